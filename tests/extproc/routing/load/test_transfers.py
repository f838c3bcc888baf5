"""Transfers from one worker: their speed and what is under way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.load.transfers import (
    FADE_SECONDS,
    MAX_MEASURED_SECONDS,
    SLACK_SECONDS,
    FleetTransfers,
    Transfers,
    counted_seconds,
)

CONFIGURED = 100_000.0


def test_speed_is_as_configured_until_transfers_are_measured_and_long_after() -> None:
    one = Transfers()
    assert one.speed(CONFIGURED, 0.0) == CONFIGURED
    for _ in range(20):
        one.measure(20_000, 1.0, 10.0)
    assert one.speed(CONFIGURED, 10.0) == pytest.approx(20_000, rel=0.1)
    assert one.speed(CONFIGURED, 10.0 + 20 * FADE_SECONDS) == pytest.approx(CONFIGURED)
    assert one.measured == 20


def test_measurements_that_show_no_transfer_are_ignored() -> None:
    for seconds in (-0.1, MAX_MEASURED_SECONDS + 1):
        assert counted_seconds(1_000, seconds, CONFIGURED) is None


def test_fleet_takes_the_speed_of_its_first_measured_pull_for_all_others() -> None:
    fleet, other = FleetTransfers(), Transfers()
    assert fleet.speed(CONFIGURED, 0.0) == CONFIGURED
    fleet.measure(8_000, 2.0, 10.0)
    assert fleet.speed(CONFIGURED, 10.0) == pytest.approx(4_000, rel=0.1)
    assert other.speed(fleet.speed(CONFIGURED, 10.0), 10.0) == pytest.approx(4_000, rel=0.1)
    assert fleet.speed(CONFIGURED, 10.0 + 20 * FADE_SECONDS) == pytest.approx(CONFIGURED)


def test_no_pull_begins_while_the_first_one_is_late() -> None:
    fleet, late_at = FleetTransfers(), 1.5 + SLACK_SECONDS
    fleet.expect(0.5, 1.0)
    fleet.expect(8.0, 1.2)  # the first one shows it first
    assert fleet.may_begin(late_at)
    assert not fleet.may_begin(late_at + 0.1)
    fleet.measure(8_000, 2.0, 3.0)
    fleet.expect(0.5, 3.0)
    assert fleet.may_begin(3.0 + late_at)


def test_late_pull_holds_others_back_for_a_bounded_time() -> None:
    fleet = FleetTransfers()
    fleet.expect(0.5, 1.0)
    assert not fleet.may_begin(MAX_MEASURED_SECONDS)
    assert fleet.may_begin(1.0 + MAX_MEASURED_SECONDS)
    fleet.expect(0.5, 1.0 + MAX_MEASURED_SECONDS)
    assert not fleet.may_begin(10.0 + MAX_MEASURED_SECONDS)


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
    fleet, one = FleetTransfers(), Transfers()
    for tokens, seconds, at in measured:
        counted = counted_seconds(tokens, seconds, configured)
        if counted is not None:
            one.measure(tokens, counted, at)
            fleet.measure(tokens, counted, at)
        assumed = fleet.speed(configured, at)
        one.begin(tokens, assumed, at)
        assert 0 < assumed < float("inf")
        assert 0 < one.speed(assumed, at) < float("inf")
        assert 0 <= one.queued_tokens(assumed, at) < float("inf")
