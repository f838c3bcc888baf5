"""The share of the caches that live conversations may fill is learned."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from extproc.features.holding.limit import (
    EVICTED_SHARE,
    FALL,
    LEAST_SHARE,
    MEMORY_SECONDS,
    RISE,
    STEP_SECONDS,
    Limit,
)


class Learned:
    """A limit, and the time that passes in it."""

    def __init__(self) -> None:
        self.limit, self.now = Limit(), 0.0

    def pass_(self, filled: float, evicted: float, *, steps: int = 1, waits: bool = False) -> float:
        """Passes some steps in which so much of the prompts is evicted; returns the limit."""
        for _ in range(steps):
            self.now += STEP_SECONDS
            self.limit.note(1_000.0, 1_000.0 * evicted, self.now)
            self.limit.step(filled, self.now, is_awaited=waits)
        return self.limit.share


@given(st.floats(0.0, 5.0), st.floats(0.0, EVICTED_SHARE - 0.01), st.integers(1, 50))
def test_there_is_no_limit_while_little_is_evicted(
    filled: float, evicted: float, steps: int
) -> None:
    assert Learned().pass_(filled, evicted, steps=steps) == inf


@given(st.floats(0.6, 5.0), st.floats(EVICTED_SHARE + 0.01, 1.0), st.integers(1, 50))
def test_limit_falls_below_what_is_filled_while_much_is_evicted(
    filled: float, evicted: float, steps: int
) -> None:
    learned = Learned()
    shares = [learned.pass_(filled, evicted, waits=True) for _ in range(steps)]
    assert shares[0] < filled
    assert shares == sorted(shares, reverse=True)


def test_limit_rises_again_while_somebody_waits_and_little_is_evicted() -> None:
    learned = Learned()
    learned.pass_(2.0, 0.5, steps=10)
    low = learned.pass_(1.0, 0.0, steps=10, waits=True)
    assert learned.pass_(1.0, 0.0, steps=10, waits=True) > low


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.booleans()), max_size=60))
def test_limit_falls_and_rises_by_no_more_than_a_step(
    steps: list[tuple[float, float, bool]],
) -> None:
    learned = Learned()
    for filled, evicted, waits in steps:
        before, after = learned.limit.share, learned.pass_(filled, evicted, waits=waits)
        assert after >= min(before, filled) * FALL or after == LEAST_SHARE
        assert after <= max(before * (1.0 + RISE), filled)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.booleans()), max_size=60))
def test_limit_never_falls_so_low_that_it_cannot_rise_again(
    steps: list[tuple[float, float, bool]],
) -> None:
    learned = Learned()
    for filled, evicted, waits in steps:
        assert learned.pass_(filled, evicted, waits=waits) >= LEAST_SHARE
    assert learned.pass_(0.0, 0.0, steps=60, waits=True) > 1.0


def test_limit_stays_while_nobody_waits_below_it() -> None:
    learned = Learned()
    learned.pass_(2.0, 0.5)
    share = learned.pass_(0.5, 0.0, steps=20)
    assert learned.pass_(0.5, 0.0, steps=20) == share
    assert learned.pass_(3.0, 0.0) == 3.0


def test_limit_changes_once_in_a_step() -> None:
    learned = Learned()
    share = learned.pass_(2.0, 0.5)
    learned.limit.step(2.0, learned.now + STEP_SECONDS / 2, is_awaited=True)
    assert learned.limit.share == share


def test_what_was_evicted_long_ago_is_forgotten() -> None:
    learned = Learned()
    learned.pass_(2.0, 1.0)
    learned.now += 10 * MEMORY_SECONDS
    learned.pass_(2.0, 0.0)
    assert learned.limit.evicted_share < 0.001
    assert Limit().evicted_share == 0.0
