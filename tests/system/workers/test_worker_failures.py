"""Workers die, hang or refuse under load: no worse with the router than without."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from tests.system.conftest import Row
from tests.system.load import LOOPS, OK, Load, body, client, counted, post
from tests.system.parts import Part
from tests.system.stage import Stage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("loop", ["closed", "open"]),
]

DURING = 150
# What chance may add to the share that a broken worker gets, over the share without a router.
CHANCE = 0.25


Times = tuple[float, float]
"""When a failure began and ended, by the clock of the outcomes."""


class Failure:
    """Something that happens to workers under load."""

    async def prepare(self, stage: Stage) -> None:
        """Runs before there is load."""

    async def begin(self, stage: Stage) -> None:
        """Begins the failure, under load."""

    async def lasts(self, loads: Sequence[Load]) -> None:
        """Waits for `DURING` requests of each load."""
        await asyncio.gather(*(load.goes_on(DURING) for load in loads))

    async def end(self) -> None:
        """Ends the failure; not needed where the next test's stage repairs it."""


class HalfDie(Failure):
    async def begin(self, stage: Stage) -> None:
        for worker in stage.workers[: len(stage.workers) // 2]:
            worker.kill()


class OneHangs(Failure):
    def __init__(self) -> None:
        self._worker: Part | None = None

    async def begin(self, stage: Stage) -> None:
        self._worker = stage.workers[0]
        self._worker.stop()

    async def lasts(self, loads: Sequence[Load]) -> None:
        """As long as ours takes: without a router, all clients may come to wait for it."""
        await loads[0].goes_on(DURING)

    async def end(self) -> None:
        assert self._worker
        self._worker.go_on()


class OneRefuses(Failure):
    """Begins before there is load, so that no Envoy finds the port closed and avoids it."""

    def __init__(self) -> None:
        self._instead: Part | None = None

    async def prepare(self, stage: Stage) -> None:
        stage.workers[0].kill()
        self._instead = stage.refusing_worker(0)
        self._instead.start()
        await asyncio.to_thread(self._instead.wait)

    async def end(self) -> None:
        assert self._instead
        self._instead.kill()


async def under_both(stage: Stage, loop: str, failure: Failure) -> tuple[Load, Load, Times]:
    """Returns the loads through Envoy and through one without ext_proc, and the failure's times."""
    run = LOOPS[loop]
    await failure.prepare(stage)
    async with (
        client() as ours,
        client() as others,
        run(lambda: post(ours, stage.url, body())) as load,
        run(lambda: post(others, stage.plain_url, body())) as plain,
    ):
        await asyncio.gather(load.goes_on(40), plain.goes_on(40))
        began = time.monotonic()
        await failure.begin(stage)
        await failure.lasts((load, plain))
        ended = time.monotonic()
        await failure.end()
    return load, plain, (began, ended)


async def test_workers_of_which_half_die_lose_no_more_than_without_a_router(
    stage: Stage, table: list[Row], loop: str
) -> None:
    load, plain, _ = await under_both(stage, loop, HalfDie())
    table.append(_row("half the workers killed", loop, load, plain))
    assert table[-1].lost_by_us == 0


async def test_hanging_worker_gets_no_larger_share_than_without_a_router(
    stage: Stage, table: list[Row], loop: str
) -> None:
    load, plain, times = await under_both(stage, loop, OneHangs())
    ours, without = (_share(one, stage, times) for one in (load, plain))
    note = f"sent to it: {ours:.0%}, without us {without:.0%}"
    table.append(_row("one worker hangs", loop, load, plain)._replace(note=note))
    assert table[-1].lost_by_us == 0
    assert {one.status for one in load.outcomes} == {OK}
    assert ours <= without + CHANCE


async def test_worker_that_answers_503_gets_no_larger_share_than_without_a_router(
    stage: Stage, table: list[Row], loop: str
) -> None:
    """It looks idle to whoever does not look at its answers."""
    load, plain, times = await under_both(stage, loop, OneRefuses())
    ours, without = (_share(one, stage, times) for one in (load, plain))
    note = f"sent to it: {ours:.0%}, without us {without:.0%}"
    for one in (load, plain):  # a worker has answered these
        one.outcomes = [each for each in one.outcomes if "overloaded" not in each.fault]
    table.append(_row("one worker answers 503", loop, load, plain)._replace(note=note))
    assert table[-1].lost_by_us == 0
    assert ours <= without + CHANCE


def _share(load: Load, stage: Stage, times: Times) -> float:
    """The share of the requests sent meanwhile that the first worker answered."""
    meanwhile = [one for one in load.outcomes if times[0] < one.started < times[1]]
    return sum(one.worker == stage.endpoints[0] for one in meanwhile) / len(meanwhile)


def _row(failure: str, loop: str, load: Load, plain: Load) -> Row:
    return Row(
        failure,
        loop,
        len(load.outcomes),
        *counted(load.outcomes),
        counted(plain.outcomes),
    )
