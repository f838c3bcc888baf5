"""Ten thousand workers that come, are used, fail, are asked and go, and leave nothing behind."""

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import random
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from random import Random
from typing import Any

import aiohttp
import pytest
from prometheus_client import generate_latest

from extproc.admin.observations import Observations
from extproc.admin.prefixes import RecentPrompts
from extproc.admin.recent import RecentDecisions
from extproc.base.errors import RequestError
from extproc.config import schema
from extproc.config.reader import parse
from extproc.fleet.asking.polling import Client
from extproc.fleet.asking.surroundings import Surroundings
from extproc.fleet.discovery.discovery import Discovery
from extproc.fleet.discovery.view import Sighting, SourceReport
from extproc.fleet.records.worker import Worker
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Outcome
from extproc.observing.usage import Usage
from extproc.proof.state import Comparison, GoldenVerdict
from extproc.requests.prompt import TEXT, Text
from extproc.requests.request import Head, RoutingRequest
from extproc.routing.decision import Decision
from extproc.routing.health.evidence import RULES, Judge
from extproc.routing.load.endpoint_load import Ticket
from extproc.running.app import remote_tokenizers
from extproc.serving.router import Router
from kvstate.events import Batch, BlocksStored, EventBatch
from kvstate.feeds.transport import Connected
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Prompt
from tests.extproc.containers import lengths
from tests.memory_transport import MemoryTransport
from tests.waiting import until

AT_ONCE = 100
# One in this many workers has a feed: those take most of the time.
WITH_FEED = 20
# Counts of the last minutes (a new minute may begin at any time), and the table of what was sent:
# bounded, whatever the fleet.
BOUNDED = ("RecentCounts.", "Claim.")
OURS = ("extproc.", "kvstate.")
# Enough cancelled timers for an event loop to drop them all: it may keep a hundred.
MANY_TIMERS = 200
IDS = array("I", range(200))
BODY = json.dumps({"model": "a", "prompt": list(IDS)}).encode()
# The table of what was sent is bounded in bytes, not by the fleet: kept small, or it would count.
CONFIG = """
models: [{name: a, tokenizer: {remote: true}}]
discovery: {file: w.yaml}
policy: {sent_bytes: 1024, scrape_interval_ms: 3600000, probe_interval_ms: 3600000}
"""
FEED = schema.WorkerEvents("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")


class Source:
    """A source that reports the workers that it is given."""

    name = "test"

    def __init__(self) -> None:
        self.report: SourceReport | None = None

    async def run(self, report: SourceReport) -> None:
        """Keeps the report, and waits for ever."""
        self.report = report
        await asyncio.Event().wait()

    def see(self, found: Iterable[Sighting]) -> None:
        """Reports these as all workers."""
        assert self.report is not None
        self.report.view(tuple(found), "")


class Answers(Client):
    """Every worker names its model and its adapter, and nothing else."""

    def __init__(self) -> None:
        """Opens nothing."""

    async def get(
        self, endpoint: str, path: str, seconds: float, max_bytes: int = 0
    ) -> tuple[int, bytes]:
        """Returns the answer to a question."""
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "a"}, {"id": "x", "parent": "a"}]}'
        if path in ("/health", "/metrics"):
            raise aiohttp.ClientError
        return 404, b""

    async def close(self) -> None:
        """Nothing is open."""


class System:
    """A router, put together as in `extproc.running.app`, but without its servers."""

    def __init__(self) -> None:
        self.config = parse(CONFIG, "c")
        self.fleet = FollowedWorkers(1, time.time)
        self.source = Source()
        self.discovery = Discovery((), [self.source])
        self.workers = Workers(
            self.config,
            self.fleet,
            lambda _: [self.transport()],
            self.discovery.fault,
            surroundings=Surroundings(make_client=Answers),
        )
        self.metrics = Metrics(self.workers.states, lambda: 0.0)  # else a report gains a minute
        self.remote = remote_tokenizers(self.config, self.workers, self.metrics)
        self.observations = Observations(time.time, kept_at_once=1_000_000)
        rng = Random(0)
        tokenizers = dict(self.remote)
        self.router = Router(
            self.config, self.workers, tokenizers, self.metrics, rng, features=[self.observations]
        )
        self.numbers = itertools.count()
        self.running: list[Ticket] = []

    def transport(self) -> MemoryTransport:
        stored = BlocksStored([1, 2], None, IDS[:32], 16)
        made = MemoryTransport({0: EventBatch(0.0, [stored])})
        made.put(Connected())
        made.put(Batch(0, EventBatch(0.0, [stored])))
        return made

    async def start(self) -> None:
        await self.workers.start()
        await self.discovery.start(self.workers.replace)
        await until(lambda: self.source.report is not None)

    async def aclose(self) -> None:
        await self.discovery.close()
        self.router.close()
        for one in self.remote.values():
            await one.close()
        await self.workers.close()

    async def come(self) -> list[str]:
        """Has AT_ONCE new workers discovered and asked what they serve; returns their names."""
        names = [f"127.1.{n % 250}.{1 + n // 250}:{1 + next(self.numbers)}" for n in range(AT_ONCE)]
        feeds = [FEED if n % WITH_FEED == 0 else None for n in range(AT_ONCE)]
        self.source.see(
            Sighting(schema.WorkerSettings(name, learn=True, events=feed))
            for name, feed in zip(names, feeds, strict=True)
        )
        await until(lambda: set(self.workers.records) == set(names))
        records = list(self.workers.records.values())
        await until(lambda: all(one.self_report.adapters for one in records))
        live = names[::WITH_FEED]
        await until(lambda: {self.workers.candidates.state(name) for name in live} == {"live"})
        return names

    async def use(self, names: list[str]) -> None:
        """Each worker gets requests, fails, and enters every state that a worker can be in."""
        for name in names:
            await self.request(name)
            await self.fail(self.workers.records[name])
        for failures in self.workers.candidates.tokenizers("a").values():
            failures.add(time.monotonic(), random.random)
        with contextlib.suppress(RequestError):  # no worker answers
            await self.remote["a"].encode(Text(names[0]), None)
        self.observations.sample(time.time(), dict.fromkeys(names, (1, 1)))
        text = generate_latest(self.metrics).decode()
        assert all(f'"{name}"' in text for name in names)
        assert len(self.workers.upstreams.ejections(time.monotonic())) == AT_ONCE

    async def request(self, name: str) -> None:
        """One request is answered elsewhere, one fails, and one still runs when the workers go."""
        ask = RoutingRequest(Head("POST", "/v1/completions", None, subset=frozenset({name})), BODY)
        elsewhere, failed, running = [await self.routed(ask, name) for _ in range(3)]
        self.router.note_server(*elsewhere, "10.9.9.9:9")
        self.router.release(elsewhere[1])
        self.router.note_answer(failed[1], 503, name)
        self.router.release(failed[1])
        self.running.append(running[1])
        usage = Usage(200, 160, "prompt")
        outcome = Outcome("a", name, False, 200, 0.1, 200, 0, usage, is_comparable=True)
        self.metrics.observe_outcome(outcome)

    async def routed(self, ask: RoutingRequest, name: str) -> tuple[Decision, Ticket]:
        decision, ticket = await self.router.route(ask)
        assert decision.pick == (name,)
        assert ticket is not None
        return decision, ticket

    async def fail(self, worker: Worker) -> None:
        """Makes a worker's answers, probes, scrapes and tokens fail, and puts it to sleep."""
        upstreams, upstream, now = self.workers.upstreams, worker.upstream, time.monotonic()
        assert upstream is not None
        for _ in range(RULES[Judge.ANSWERS].failures):
            upstreams.note_answer(worker.endpoint, 503, now)
            for one in self.workers.questions.regular:
                await one.ask(self.workers.questions.polling.client, worker)
        upstreams.eject(upstream, Judge.DOUBTS, "is dead", now)
        upstreams.eject(upstream, Judge.SLEEP, "sleeps", now)
        assert all(upstream.is_ejected_by(judge, now) for judge in Judge)
        self.workers.proofs.note_sent(worker.name, Prompt("a", IDS), TEXT, None)
        refuting = Comparison(1, {TEXT: GoldenVerdict(is_same=False, reason="it differs")})
        self.workers.proofs.compared(worker, refuting)

    async def go(self) -> None:
        """Removes all workers; what was under way there ends later."""
        self.source.see(())
        await until(lambda: not self.workers.records)
        for ticket in self.running:
            self.router.note_answer(ticket, 503, "")
            self.router.release(ticket)
        self.running.clear()
        await until(
            lambda: not (self.fleet._ranks.workers() or self.fleet.subscriptions._releasing)
        )
        assert self.workers.candidates.overlaps(Prompt("a", IDS)) == {}
        self.observations.sample(time.time(), {})

    async def forget(self) -> None:
        """Drops the last decisions and cancelled timers: bounded, but not always as many."""
        self.observations.recent, self.observations.prompts = RecentDecisions(), RecentPrompts()
        loop = asyncio.get_running_loop()
        for _ in range(MANY_TIMERS):
            loop.call_later(3_600.0, _objects).cancel()
        await asyncio.sleep(0)

    def lengths(self) -> Counter[str]:
        """The lengths of all containers that can be reached from any part."""
        parts = (self.workers, self.metrics, self.router, self.observations, self.discovery)
        found = lengths(parts=parts, remote=self.remote, fleet=self.fleet)
        assert found["Table.by_name"] == len(self.workers.records)  # it reaches into the parts
        return Counter({name: n for name, n in found.items() if not name.startswith(BOUNDED)})


def _are_ended_but(tasks: set[asyncio.Task[Any]]) -> bool:
    """Returns whether no other tasks than these run."""
    return asyncio.all_tasks() <= tasks


def _objects() -> Counter[str]:
    """Returns how many objects of each type are not garbage."""
    gc.collect()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def _ours(objects: Counter[str]) -> Counter[str]:
    """Returns those of our own types."""
    return Counter({name: n for name, n in objects.items() if name.startswith(OURS)})


def _leaked(objects: Sequence[Counter[str]]) -> Counter[str]:
    """Returns which types grew, if there were more objects after every span of rounds.

    A leak grows in each of them; what Python or another test made meanwhile, only in one. Objects
    of our own types are not judged so: they may not grow in any.
    """
    spans = list(itertools.pairwise(objects))
    before, after = min(spans, key=lambda span: span[1].total() - span[0].total())
    return after - before if after.total() - before.total() > AT_ONCE else Counter()


async def _churn(one: System, rounds: int) -> None:
    """Has workers come and go, and looks three times at what is left.

    Raises:
        AssertionError: it grew.
    """
    lengths: list[Counter[str]] = []
    objects: list[Counter[str]] = []
    grown: Counter[str] = Counter()

    def is_nothing_left() -> bool:
        nonlocal grown
        if lengths:
            ours = _ours(_objects()) - _ours(objects[0])
            grown = one.lengths() - lengths[0] + (ours if ours.total() > AT_ONCE else Counter())
        return not grown

    for number in range(1, rounds + 1):
        tasks = asyncio.all_tasks()
        names = await one.come()
        await one.use(names)
        await one.go()
        if number in (rounds // 3, 2 * rounds // 3, rounds):
            text = generate_latest(one.metrics).decode()
            assert not any(f'"{name}"' in text for name in names)
            del names
            # what is under way may hold the last workers for a moment
            await until(partial(_are_ended_but, tasks), "no task of theirs runs")
            await one.forget()
            await until(is_nothing_left, "nothing is left")
            lengths.append(one.lengths())  # first: Python creates the dicts of what is looked into
            objects.append(_objects())
    assert not _leaked(objects)


# Half a minute of CPU, which takes many times as long on a busy machine.
MANY = pytest.param(100, marks=(pytest.mark.slow, pytest.mark.timeout(1200)))


@pytest.mark.parametrize("rounds", [12, MANY])
async def test_workers_that_come_and_go_leave_no_objects_behind(
    rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "kvsteer")  # log records are kept, and would be counted
    async with contextlib.aclosing(System()) as one:
        await one.start()
        await _churn(one, rounds)
