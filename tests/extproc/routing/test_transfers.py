"""Transfers from one worker: their speed and what is under way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.transfers import FADE_SECONDS, MAX_MEASURED_SECONDS, Transfers

CONFIGURED = 100_000.0


def test_speed_is_as_configured_until_transfers_are_measured_and_long_after() -> None:
    one = Transfers()
    assert one.speed(CONFIGURED, 0.0) == CONFIGURED
    for _ in range(20):
        one.measure(20_000, 1.0, CONFIGURED, 10.0)
    assert one.speed(CONFIGURED, 10.0) == pytest.approx(20_000, rel=0.1)
    assert one.speed(CONFIGURED, 10.0 + 20 * FADE_SECONDS) == pytest.approx(CONFIGURED)
    assert one.measured == 20


def test_measurements_that_show_no_transfer_are_ignored() -> None:
    one = Transfers()
    for seconds in (-0.1, MAX_MEASURED_SECONDS + 1):
        one.measure(1_000, seconds, CONFIGURED, 1.0)
    assert (one.measured, one.speed(CONFIGURED, 1.0)) == (0, CONFIGURED)


def test_queue_is_what_was_begun_less_what_the_speed_has_sent_since() -> None:
    one = Transfers()
    assert one.begin(50_000, CONFIGURED, 1.0) == 50_000
    assert one.begin(10_000, CONFIGURED, 1.0) == 60_000
    assert one.queued_tokens(CONFIGURED, 1.2) == pytest.approx(40_000)
    assert one.queued_tokens(CONFIGURED, 2.0) == 0.0


def test_transfers_are_shown_with_their_speed_and_queue() -> None:
    one = Transfers()
    one.begin(50_000, CONFIGURED, 1.0)
    shown = {"tokens_per_second": 100_000, "measured": 0, "sent_tokens": 50_000}
    assert one.as_json(CONFIGURED, 1.0) == {**shown, "queued_tokens": 50_000}


@given(
    st.lists(
        st.tuples(st.floats(1, 1e6), st.floats(0, 40), st.floats(0, 1e4)), min_size=1, max_size=8
    ),
    st.floats(1, 1e7),
)
def test_speed_is_positive_and_finite_whatever_is_measured(
    measured: list[tuple[float, float, float]], configured: float
) -> None:
    one = Transfers()
    for tokens, seconds, at in measured:
        one.measure(tokens, seconds, configured, at)
        one.begin(tokens, configured, at)
        assert 0 < one.speed(configured, at) < float("inf")
        assert 0 <= one.queued_tokens(configured, at) < float("inf")
