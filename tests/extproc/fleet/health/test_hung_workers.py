"""Workers that hang take no other worker's place, simulated in virtual time."""

import asyncio
import selectors
from collections.abc import Coroutine
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.asking.ask_interval import AskInterval
from extproc.fleet.asking.polling import CHECK_SECONDS, Client, Polling
from extproc.fleet.health.doubts import Doubts
from extproc.fleet.health.health_probe import HealthProbe
from extproc.fleet.records.table import Table
from extproc.routing.health.evidence import Judge
from extproc.routing.health.probe_schedule import ASKED_AGAIN_SECONDS, RETRY_SECONDS
from extproc.routing.health.upstreams import Upstream
from tests.extproc.fleet.asked import table_of
from tests.waiting import until

WORKERS = 1_000
HUNG = [0, 16, pytest.param(200, marks=pytest.mark.slow), 999]


class Leaping(selectors.DefaultSelector):
    """Waits for nothing: time leaps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = Leaping()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now


def simulated(scene: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(scene)


class Fleet(Client):
    """Answers for workers: some hang, all others are well and answer after a moment.

    asked: those that hang, and were asked.
    """

    def __init__(self, hung: set[str]) -> None:
        super().__init__()
        self._hung = hung
        self.asked: set[str] = set()

    def has_asked_all(self) -> bool:
        return self.asked == self._hung

    async def get(
        self, endpoint: str, path: str, seconds: float, max_bytes: int = 0
    ) -> tuple[int, bytes]:
        assert path == "/health"
        assert max_bytes == 0
        if endpoint in self._hung:
            self.asked.add(endpoint)
            await asyncio.sleep(seconds)
            raise TimeoutError
        await asyncio.sleep(0.005)
        return 200, b""


def is_back(upstream: Upstream, judge: Judge) -> bool:
    return judge not in upstream.evidence


def fleet(hung: int) -> tuple[Table, Fleet]:
    names = [f"10.0.{n // 250}.{n % 250 + 1}:80" for n in range(WORKERS)]
    return table_of(*names), Fleet(set(names[:hung]))


@pytest.mark.parametrize("interval_seconds", [1.0, pytest.param(5.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hung", HUNG)
def test_healthy_ejected_worker_returns_within_two_intervals(
    hung: int, interval_seconds: float
) -> None:
    async def scene() -> None:
        time, random = asyncio.get_running_loop().time, Random(hung)
        table, workers = fleet(hung)
        polling = Polling()
        probe = HealthProbe(table, AskInterval(interval_seconds, random.random, time), time)
        for worker in table:

            async def ask(one: Any = worker) -> float:
                return await probe.ask(workers, one)

            first = probe.interval.first_seconds()
            worker.polls["health"] = polling.poll(probe.question, worker.name, ask, first)
        await until(workers.has_asked_all, "the hung ones hang in every place")
        (ejected,) = list(table.upstreams)[-1:]
        for _ in range(10):
            ejected_at = time()
            table.upstreams.eject(ejected, Judge.PROBE, "was ill", ejected_at)
            await until(partial(is_back, ejected, Judge.PROBE), "it is back")
            assert time() - ejected_at <= 2 * interval_seconds
        for worker in table:
            worker.stop_asking("health")
        await polling.close()
        await workers.close()

    simulated(scene())


@pytest.mark.parametrize("hung", HUNG)
def test_healthy_doubted_worker_is_probed_at_once(hung: int) -> None:
    async def scene() -> None:
        time = asyncio.get_running_loop().time
        table, workers = fleet(hung)

        class Asked(Polling):
            client = workers

        polling = Asked()
        doubts = Doubts(table, polling, lambda _: (True, 0), time)  # all feeds are cut
        polling.start([doubts.check])
        await until(workers.has_asked_all, "the hung ones hang in every place")
        (ejected,) = list(table.upstreams)[-1:]
        ejected_at = time()
        table.upstreams.eject(ejected, Judge.DOUBTS, "was ill", ejected_at)
        await until(partial(is_back, ejected, Judge.DOUBTS), "it is back")
        waits = max(ASKED_AGAIN_SECONDS, RETRY_SECONDS) + 2 * CHECK_SECONDS
        assert time() - ejected_at <= waits
        await polling.close()
        await workers.close()

    simulated(scene())


ERRORS = st.sampled_from((RuntimeError, ValueError, KeyError, AssertionError))


@given(st.lists(ERRORS | st.none(), min_size=1, max_size=6))
def test_unexpected_error_does_not_end_the_probes(
    errors: list[type[Exception] | None],
) -> None:
    async def scene() -> None:
        table = table_of("127.0.0.1:1")
        left = list(errors)

        class Failing(Client):
            async def get(self, *_: Any) -> tuple[int, bytes]:
                error = left.pop() if left else None
                if error is not None:
                    raise error
                return 200, b""

        failing = Failing()

        class Asked(Polling):
            client = failing

        polling = Asked()
        doubts = Doubts(table, polling, lambda _: (True, 0), asyncio.get_running_loop().time)
        polling.start([doubts.check])
        await until(lambda: not left, "it was asked as often")
        await polling.close()
        await failing.close()

    simulated(scene())
