import asyncio
import contextlib
import socket
import time
from array import array
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from aiohttp import web

from extproc.fleet.asking.polling import Client, Polling
from extproc.fleet.health.doubts import Doubts
from extproc.fleet.health.health_probe import HealthProbe
from extproc.fleet.records.table import Table
from extproc.routing.claims.claim_table import ClaimTable
from extproc.routing.health.evidence import RULES, Judge
from extproc.routing.load.loads import Loads
from kvstate.overlap import Prompt
from tests.extproc.fleet.asked import (
    Engine,
    against,
    interval,
    only,
    running,
    table_of,
    workers_of,
)
from tests.ports import free_port
from tests.waiting import until

PROMPT = Prompt("m", array("I", range(100)))
UNHEALTHY = "fails its health probe"


def probe(table: Table) -> HealthProbe:
    return HealthProbe(table, interval(), time.monotonic)


@pytest.mark.parametrize("status", [503, 404, 302])
async def test_unhealthy_worker_is_ejected_until_it_recovers(
    engine: Engine, http: Client, status: int
) -> None:
    table = table_of(engine.endpoint)
    asking = probe(table)
    engine.status = status
    for number in range(RULES[Judge.PROBE].failures):
        assert not against(table, Judge.PROBE), number
        await asking.ask(http, only(table))
    assert table.upstreams.ejections(0.0) == {engine.endpoint: UNHEALTHY}
    engine.status = 200
    await asking.ask(http, only(table))
    assert table.upstreams.ejections(0.0) == {}


async def test_probe_failures_count_only_in_a_row(engine: Engine, http: Client) -> None:
    table = table_of(engine.endpoint)
    asking = probe(table)
    for status in (503, 200, 503, 200):
        engine.status = status
        await asking.ask(http, only(table))
    assert against(table, Judge.PROBE) == {}


async def test_probe_failure_clears_the_expectations_of_an_unreachable_worker(http: Client) -> None:
    table, sent = table_of("127.0.0.1:1"), ClaimTable(1)
    marks = sent.marks(PROMPT)
    sent.record(only(table).holdings, marks, time.monotonic())
    for _ in range(RULES[Judge.PROBE].failures):
        assert sent.expected(marks, time.monotonic())
        await probe(table).ask(http, only(table))
    assert not sent.expected(marks, time.monotonic())


async def test_probe_success_keeps_ejections_of_other_judges(engine: Engine, http: Client) -> None:
    table = table_of(engine.endpoint)
    (upstream,) = table.upstreams
    table.upstreams.eject(upstream, Judge.SCRAPES, "does not answer", 0.0)
    await probe(table).ask(http, only(table))
    assert table.upstreams.ejections(0.0) == {engine.endpoint: "does not answer"}


async def test_probe_repeats_at_its_interval(engine: Engine) -> None:
    async with running(workers_of(engine.endpoint, "{probe_interval_ms: 50}")) as one:
        await until(lambda: engine.asked >= 3)
        engine.status = 500
        await until(lambda: one.states.down(engine.endpoint) == UNHEALTHY)


@pytest.mark.parametrize("policy", ["{}", "{probe_interval_ms: 0}"])
async def test_probe_is_off_by_default(engine: Engine, policy: str) -> None:
    async with running(workers_of(engine.endpoint, policy)):
        pass
    assert engine.asked == 0


async def test_probe_ejection_passes_to_a_new_worker_at_the_same_address(
    engine: Engine, http: Client
) -> None:
    table = table_of(engine.endpoint)
    engine.status = 503
    for _ in range(2):
        asking = probe(table)
        for _ in range(RULES[Judge.PROBE].failures):
            await asking.ask(http, only(table))
        assert against(table, Judge.PROBE) == {engine.endpoint: UNHEALTHY}
        member = only(table).member
        table.replace({})
        table.replace({engine.endpoint: member})
        assert against(table, Judge.PROBE) == {}


async def test_probe_answer_after_removal_of_its_worker_leaves_no_state(
    engine: Engine, http: Client
) -> None:
    table = table_of(engine.endpoint)
    engine.status, worker = 503, only(table)
    asking = asyncio.gather(*(probe(table).ask(http, worker) for _ in range(9)))
    await asyncio.sleep(0)
    table.replace({})
    await asking
    assert (list(table.upstreams), table.upstreams.ejections(0.0)) == ([], {})


async def test_probe_does_not_log_a_death_that_scrapes_logged(
    http: Client, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvsteer")
    table = table_of(engine.endpoint)
    (upstream,) = table.upstreams
    table.upstreams.eject(upstream, Judge.SCRAPES, "does not answer on its endpoint", 0.0)
    for status in (503, 503, 200):
        engine.status = status
        await probe(table).ask(http, only(table))
    assert caplog.messages == []


class Life:
    """What the feed of a worker shows."""

    def __init__(self) -> None:
        self.is_cut = False
        self.publishes = False
        self.looks = 0

    def sign(self, _: str) -> tuple[bool, int]:
        self.looks += 1
        return self.is_cut, self.looks if self.publishes else 0


def doubted(table: Table) -> bool:
    return any(one.is_doubted for one in table.upstreams)


def doubt(table: Table) -> None:
    table.upstreams.doubt(only(table).endpoint, is_doubted=True)


def dead(table: Table) -> str:
    """Why the one worker is considered dead; "" if it is not."""
    return against(table, Judge.DOUBTS).get(only(table).endpoint, "")


class Followed(Polling):
    """Keeps the tasks that it runs: first the one that looks, then the questions."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[asyncio.Task[None]] = []

    def run(self, asking: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.runs.append(super().run(asking))
        return self.runs[-1]


@contextlib.asynccontextmanager
async def doubting(table: Table, life: Life) -> AsyncIterator[Followed]:
    polling = Followed()
    polling.start([Doubts(table, polling, life.sign, time.monotonic).check])
    try:
        yield polling
    finally:
        await polling.close()


async def test_doubts_probe_no_sound_worker(engine: Engine) -> None:
    life = Life()
    async with doubting(table_of(engine.endpoint), life):
        await until(lambda: life.looks >= 6)
    assert engine.asked == 0


async def test_doubts_probe_a_worker_without_events_and_keep_it(engine: Engine) -> None:
    table, life = table_of(engine.endpoint), Life()
    life.is_cut = True
    engine.status = 404  # it does not know the path either
    async with doubting(table, life):
        await until(lambda: engine.asked >= 2)
    assert not dead(table)


async def test_doubts_eject_a_worker_that_refuses_connections_until_it_returns() -> None:
    endpoint, life, sent = f"127.0.0.1:{free_port()}", Life(), ClaimTable(1)
    table = table_of(endpoint)
    life.is_cut = True
    marks = sent.marks(PROMPT)
    sent.record(only(table).holdings, marks, time.monotonic())
    async with doubting(table, life):
        await until(lambda: bool(dead(table)))
        assert not sent.expected(marks, time.monotonic())
        life.is_cut = False  # that it is dead is reason enough to probe it
        runner = web.AppRunner(web.Application())
        await runner.setup()
        await web.TCPSite(runner, *endpoint.split(":")).start()  # type: ignore[arg-type]
        await until(lambda: not dead(table))
        await runner.cleanup()


async def test_doubts_eject_a_silent_host_with_a_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # only the kernel accepts connections
        table = table_of(f"127.0.0.1:{listener.getsockname()[1]}")
        loads = Loads(table.upstreams.loads)
        loads.begin(only(table).endpoint, 10, time.monotonic())
        async with doubting(table, Life()):
            await until(lambda: bool(dead(table)))
    assert dead(table) == "does not answer: not a byte within 1 s"


async def test_doubts_keep_a_busy_worker_that_publishes() -> None:
    life = Life()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        table = table_of(f"127.0.0.1:{listener.getsockname()[1]}")
        doubt(table)  # so it is asked, and does not answer
        life.publishes = True
        async with doubting(table, life):
            await until(lambda: not doubted(table))
    assert not dead(table)


async def test_doubts_count_reported_faults_in_a_row(engine: Engine) -> None:
    table = table_of(engine.endpoint)

    def is_dead() -> bool:
        doubt(table)  # anew: an answer that comes late, while all is held up, ends a doubt
        return bool(dead(table))

    doubt(table)
    engine.status = 503
    async with doubting(table, Life()):
        await until(is_dead)
        assert engine.asked >= RULES[Judge.DOUBTS].failures
        engine.status = 200
        await until(lambda: not dead(table))
        assert not doubted(table)


async def test_doubts_keep_a_worker_that_speaks_no_http() -> None:
    async def other(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    table = table_of(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    doubt(table)
    async with server, doubting(table, Life()):
        await until(lambda: not doubted(table))
    assert not dead(table)


async def test_doubts_leave_no_state_of_a_worker_removed_during_its_probe(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    table, life = table_of(engine.endpoint), Life()
    (upstream,) = table.upstreams
    for _ in range(RULES[Judge.DOUBTS].failures - 1):
        table.upstreams.note_failure(upstream, Judge.DOUBTS, "is ill", 0.0)
    engine.status, life.is_cut = 503, True
    engine.before_answer = lambda: table.replace({})
    async with doubting(table, life) as polling:
        await until(lambda: engine.asked >= 1)
        _, question = polling.runs
        await until(question.done)
        await question
    assert (table.upstreams.ejections(0.0), table.upstreams.has_suspects) == ({}, False)
    assert caplog.messages == []
