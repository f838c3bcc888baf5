import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.feeds.backoff import Backoff, FailureWaits


def test_backoff_doubles_waits_up_to_the_limit_until_reset() -> None:
    backoff = Backoff(1.0, 5.0, chance=lambda: 0.5)
    assert [backoff.next_seconds() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_seconds() == 1.0


def test_backoff_spreads_waits_by_chance() -> None:
    soonest, latest = Backoff(2.0, 8.0, lambda: 0.0), Backoff(2.0, 8.0, lambda: 1.0)
    assert (soonest.next_seconds(), latest.next_seconds()) == (1.0, 3.0)


@given(
    times=st.lists(st.tuples(st.floats(0, 300), st.booleans()), min_size=1),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_failure_waits_grow_until_a_long_time_without_failure(
    times: list[tuple[float, bool]], chance: float
) -> None:
    waits = FailureWaits(1.0, 60.0, lambda: chance)
    again_at, nominal = 0.0, 1.0
    for number, (seconds, worked) in enumerate(times):
        now = again_at + seconds
        if number and worked and seconds >= 60.0:
            nominal = 1.0
        again_at = waits.again_at(now, worked=worked)
        assert again_at - now == pytest.approx(nominal * (0.5 + chance), abs=1e-6)
        nominal = min(60.0, 2 * nominal)
