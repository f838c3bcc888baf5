"""A thousand workers that come and go leave nothing behind."""

import asyncio
import gc
import itertools
import logging
import time
from array import array
from collections.abc import Callable, Collection, Iterable
from random import Random

import pytest

from extproc import config
from extproc.config.reader import parse
from extproc.discovery.view import Found, Member
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Outcome, Usage
from extproc.picking.placing import Placing
from extproc.workers.asking import HealthProbe, LoadReports
from extproc.workers.workers import Workers
from kvstate.events import Batch, BlocksStored, EventBatch
from kvstate.feeds.transport import Connected, MemoryTransport
from kvstate.fleet import Fleet
from kvstate.overlap import Prompt

AT_ONCE, ROUNDS = 250, 4
TOKENS = array("I", range(200))
CONFIG = "models: [{name: a}]\nworkers: [{endpoint: '127.0.0.2:1'}]\npolicy: {sent_bytes: 1024}"
EVENTS = config.WorkerEvents("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")


class Router:
    """What of a router keeps something of each worker."""

    def __init__(self) -> None:
        # what was sent is bounded in bytes, not by the fleet: little of it, or it would be counted
        self.config = parse(CONFIG, "c")
        self.fleet = Fleet(1, time.time)
        self.workers = Workers(self.config, self.fleet, lambda _: [self.transport()])
        self.placing = Placing(self.config, secret=1)
        self.metrics = Metrics()
        self.metrics.add_workers(lambda: self.workers.status(lambda _: 0), lambda: 0)
        self.metrics.drifts.circumstances = self.workers.circumstances
        now, chance = time.monotonic, Random(0).random
        places, loads = self.workers.places, self.workers.loads
        self.reports = LoadReports(self.placing, places, loads, 0.2, chance, now)
        self.probe = HealthProbe(self.placing, places, 0.2, chance, now)
        self.workers.gone.append(lambda name, at: self.placing.remove(name, at, now()))
        self.workers.changed.append(self.drain)
        self.numbers = itertools.count()

    def drain(self) -> None:
        self.placing.draining = self.workers.draining()

    def transport(self) -> MemoryTransport:
        stored = BlocksStored([1, 2], None, TOKENS[:32], 16)
        made = MemoryTransport({0: EventBatch(0.0, [stored])})
        made.put(Connected())
        made.put(Batch(0, EventBatch(0.0, [stored])))
        return made

    async def start(self) -> None:
        await self.workers.start()
        await self.reports.start()
        await self.probe.start()

    async def close(self) -> None:
        await self.reports.close()
        await self.probe.close()
        await self.workers.close()

    async def come(self) -> list[str]:
        """So many new workers, each with blocks, a request, an outcome and failing probes."""
        names = [f"127.0.1.{1 + n % 250}:{1 + next(self.numbers)}" for n in range(AT_ONCE)]
        found = [Found(config.Worker(name, "a", events=EVENTS)) for name in names]
        await self.workers.replace({one.worker.endpoint: Member(one, "file") for one in found})
        await until(lambda: {self.workers.state(name) for name in names} == {"live"})
        assert len(self.workers.overlaps(Prompt("a", TOKENS))) == AT_ONCE
        for name in names:
            assert self.workers.drain(name, draining=True)
            self.place(name)
        await until(lambda: len(self.placing.unhealthy) == AT_ONCE)
        return names

    def place(self, name: str) -> None:
        """A request on its way to a worker that is never told to be over, and an answered one."""
        now, books = time.monotonic(), self.placing
        books.loads.begin(name, 33, now)
        books.sent.record(name, books.sent.marks(Prompt("a", TOKENS)), now)
        assert name in self.expected()
        usage = Usage(33, 32)
        outcome = Outcome("a", name, False, 200, 0.1, 33, 0, usage, is_comparable=True)  # noqa: FBT003
        self.metrics.observe_outcome(outcome)

    def expected(self) -> Collection[str]:
        """The workers that are taken to hold the prompt on account of requests."""
        sent = self.placing.sent
        return sent.expected(sent.marks(Prompt("a", TOKENS)), time.monotonic())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


def named_in(text: bytes, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.encode() in text]


@pytest.mark.slow
async def test_workers_that_come_and_go_leave_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "kvsteer")  # records are kept, and would be counted
    one = Router()
    await one.start()
    sizes: list[tuple[int, int, int]] = []
    for _ in range(ROUNDS):
        names = await one.come()
        assert len(named_in(one.metrics.exposition(), names)) == AT_ONCE
        await one.workers.replace({})
        await until(lambda: not (one.placing.unhealthy or one.placing.unfit or one.probe._failures))
        await until(lambda: not (one.reports._failures or one.placing.loads._endpoints))
        assert named_in(one.metrics.exposition(), names) == []
        assert (one.workers.status(lambda _: 0), one.workers.draining()) == ([], set())
        assert one.workers.overlaps(Prompt("a", TOKENS)) == {}
        assert not one.expected()
        assert not one.placing.draining
        assert not one.metrics.drifts.by_worker
        gc.collect()
        sizes.append((len(asyncio.all_tasks()), one.fleet.index_bytes(), len(gc.get_objects())))
    tasks, index_bytes, objects = zip(*sizes, strict=True)
    assert len(set(tasks)) == 1
    assert index_bytes[-1] <= index_bytes[1]
    assert objects[-1] - objects[1] < AT_ONCE
    await one.close()
