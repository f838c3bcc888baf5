"""When workers have what they pull from others."""

from array import array

import pytest

from extproc.fleet.load.computed import CHECK_SECONDS
from extproc.fleet.load.pull_arrivals import MAX_WATCHED, PullArrivals
from extproc.routing.load.transfers import MAX_MEASURED_SECONDS
from kvstate.overlap import Overlap, Prompt

PROMPT = Prompt("m", array("I", range(40_000)))


class Watch:
    """Arrivals at workers whose blocks a test sets; noted: how late and when they were seen."""

    def __init__(self) -> None:
        self.now = 1.0
        self.held: dict[str, Overlap] = {}
        self.asked = 0
        self.noted: list[tuple[float, float]] = []
        self.arrivals = PullArrivals(self._overlaps, lambda _: 0.02, lambda: self.now)

    def _overlaps(self, _: Prompt) -> dict[str, Overlap]:
        self.asked += 1
        return self.held

    def begin(self, worker: str = "w") -> None:
        self.arrivals.watch(worker, PROMPT, 1_600, lambda late, now: self.noted.append((late, now)))


def test_arrival_is_noted_once_when_the_worker_has_enough() -> None:
    one = Watch()
    one.begin()
    for blocks in (0, 99, 100, 100):
        one.held = {"w": Overlap(16, (blocks, 0, 0, 0))}
        one.arrivals.check.run()
    ((late, at),) = one.noted
    assert late == pytest.approx(0.02 + CHECK_SECONDS / 2)
    assert at == 1.0


def test_pull_that_never_arrives_is_given_up() -> None:
    one = Watch()
    one.begin()
    one.arrivals.check.run()
    one.now += MAX_MEASURED_SECONDS + 1
    one.held = {"w": Overlap(16, (100, 0, 0, 0))}
    one.arrivals.check.run()
    assert (one.noted, one.asked) == ([], 1)


def test_watched_pulls_and_tokens_of_a_look_are_bounded() -> None:
    one = Watch()
    for _ in range(2 * MAX_WATCHED):
        one.begin()
    one.arrivals.check.run()
    assert one.asked == 3
    one.held = {"w": Overlap(16, (100, 0, 0, 0))}
    for _ in range(MAX_WATCHED):
        one.arrivals.check.run()
    assert len(one.noted) == MAX_WATCHED
