import asyncio
from collections.abc import Iterator

import pytest

from extproc.admin.application import AT_ONCE, Fill, Sampling
from extproc.admin.observed import Observed


def fills(count: int) -> Iterator[Fill]:
    return ((f"w{number}", 1, 2) for number in range(count))


async def test_the_fleet_is_sampled_until_it_is_closed() -> None:
    observed, sampled = Observed(), asyncio.Semaphore(0)

    def clock() -> float:
        sampled.release()
        return 5.0

    sampling = Sampling(observed, lambda: fills(AT_ONCE + 1), clock, step_seconds=0.001)
    sampling.start()
    async with asyncio.timeout(20):
        for _ in range(3):
            await sampled.acquire()
    await sampling.close()
    assert len(observed.history.names()) == AT_ONCE + 1
    assert observed.is_closed


async def test_a_sample_that_fails_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    observed, again = Observed(), asyncio.Event()

    def found() -> Iterator[Fill]:
        if "could not be sampled" not in caplog.text:
            raise KeyError("gone meanwhile")
        again.set()
        return fills(1)

    sampling = Sampling(observed, found, lambda: 5.0, step_seconds=0.001)
    sampling.start()
    async with asyncio.timeout(20):
        await again.wait()
    await sampling.close()


async def test_what_was_never_started_is_closed_all_the_same() -> None:
    await Sampling(Observed(), lambda: fills(0), lambda: 0.0).close()
