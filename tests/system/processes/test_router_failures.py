"""The router goes away, in every way, under load: Envoy answers all the same."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.system.conftest import Row
from tests.system.load import CLIENTS, LOOPS, Load, body, client, counted, post
from tests.system.stage import Stage
from tests.system.steering import Probes

AWAY_REQUESTS = 60

# Under clients that wait for answers, and under arrivals that wait for nothing.
loaded = pytest.mark.parametrize(
    "loop", ["closed", pytest.param("open", marks=pytest.mark.slow)], scope="package"
)

Failure = Callable[[Stage, Load], Awaitable[None]]
"""Breaks something and begins to make it whole again."""


async def killed(stage: Stage, load: Load) -> None:
    stage.routers[0].kill()
    await load.goes_on(AWAY_REQUESTS)
    stage.routers[0].start()


async def ended(stage: Stage, load: Load) -> None:
    await asyncio.to_thread(stage.routers[0].terminate)
    await load.goes_on(AWAY_REQUESTS)
    stage.routers[0].start()


async def restarted(stage: Stage, _: Load) -> None:
    await asyncio.to_thread(stage.routers[0].terminate)
    stage.routers[0].start()


async def stopped(stage: Stage, load: Load) -> None:
    stage.routers[0].stop()
    await load.goes_on(AWAY_REQUESTS)
    stage.routers[0].go_on()


async def slow(stage: Stage, load: Load) -> None:
    """Stopped for most of the time: until the next answer, or for longer than Envoy waits."""
    for answers in (1, 3 * CLIENTS, 1, 3 * CLIENTS, 1):
        stage.routers[0].stop()
        await load.goes_on(answers)
        stage.routers[0].go_on()
        await load.goes_on(1)


async def listens(stage: Stage) -> float:
    """Waits until the first router can be connected to; returns the time."""
    await asyncio.to_thread(stage.routers[0].wait)
    return time.monotonic()


async def judged(stage: Stage, name: str, loop: str, failure: Failure) -> Row:
    async with client() as session:
        probes = Probes(session, stage, stage.url)
        await probes.prepare()
        async with LOOPS[loop](lambda: post(session, stage.url, body())) as load:
            await load.goes_on(30)
            await failure(stage, load)
            steers = await probes.steered_after(await listens(stage))
            await load.goes_on(30)
    row = Row(name, loop, len(load.outcomes), *counted(load.outcomes))
    return row._replace(steers_ms=1e3 * steers)


@loaded
async def test_killed_router_loses_no_request(stage: Stage, table: list[Row], loop: str) -> None:
    table.append(await judged(stage, "router killed, started again", loop, killed))
    assert table[-1].lost_by_us == 0


@pytest.mark.slow
@loaded
@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("router ended, started again", ended),
        ("router restarted", restarted),
        ("router hangs (SIGSTOP), goes on", stopped),
        ("router slow (stopped most of the time)", slow),
    ],
)
async def test_missing_router_loses_no_request(
    stage: Stage, table: list[Row], name: str, failure: Failure, loop: str
) -> None:
    table.append(await judged(stage, name, loop, failure))
    assert table[-1].lost_by_us == 0


@pytest.mark.slow
@loaded
async def test_router_started_after_envoy_loses_no_request(
    stage: Stage, table: list[Row], loop: str
) -> None:
    async with client() as session:
        probes = Probes(session, stage, stage.url)
        await probes.prepare()
        stage.routers[0].kill()
        stage.envoy.kill()
        stage.envoy.start()
        await asyncio.to_thread(stage.envoy.wait)
        async with LOOPS[loop](lambda: post(session, stage.url, body())) as load:
            await load.goes_on(AWAY_REQUESTS)
            stage.routers[0].start()
            steers = await probes.steered_after(await listens(stage))
    row = Row("router down at start", loop, *_figures(load))
    table.append(row._replace(steers_ms=1e3 * steers))
    assert table[-1].lost_by_us == 0


@pytest.fixture
async def two(stage: Stage) -> AsyncIterator[Stage]:
    for part in (stage.routers[1], stage.envoy_of_two):
        part.start()
        await asyncio.to_thread(part.wait)
    yield stage
    for part in (stage.routers[1], stage.envoy_of_two):
        part.kill()


@pytest.mark.slow
@loaded
@pytest.mark.parametrize("count", [1, 2])
async def test_killed_routers_of_two_lose_no_request(
    two: Stage, table: list[Row], loop: str, count: int
) -> None:
    async with client() as session:
        probes = Probes(session, two, two.url_of_two)
        await probes.prepare()
        async with LOOPS[loop](lambda: post(session, two.url_of_two, body())) as load:
            await load.goes_on(30)
            for router in two.routers[:count]:
                router.kill()
            since = time.monotonic()
            if count == len(two.routers):
                await load.goes_on(AWAY_REQUESTS)
                two.routers[0].start()
                since = await listens(two)
            steers = await probes.steered_after(since)
            await load.goes_on(30)
    name = "one of two routers killed" if count == 1 else "both routers killed, one started"
    row = Row(name, loop, *_figures(load))
    table.append(row._replace(steers_ms=1e3 * steers))
    assert table[-1].lost_by_us == 0


def _figures(load: Load) -> tuple[int, int, int]:
    return len(load.outcomes), *counted(load.outcomes)
