from hypothesis import given
from hypothesis import strategies as st

from extproc.load import PREFILL_TOKENS_PER_SECOND, Booking, Loads
from extproc.pick import Load


def test_a_booking_is_in_flight_until_it_ends() -> None:
    loads = Loads()
    booking = loads.begin("a", 100, now=0.0)
    assert (loads.in_flight("a"), loads.in_flight("b")) == (1, 0)
    loads.end(booking)
    assert loads.in_flight("a") == 0


def test_both_are_told_in_one_call() -> None:
    loads = Loads()
    assert loads.load("a", 0.0) == Load()
    loads.begin("a", 100, now=0.0)
    assert loads.load("a", 0.0) == Load(1, 100.0)


def test_ending_twice_changes_nothing() -> None:
    loads = Loads()
    first, second = loads.begin("a", 1, now=0.0), loads.begin("a", 1, now=0.0)
    loads.end(first)
    loads.end(first)
    assert loads.in_flight("a") == 1
    loads.end(second)
    loads.end(second)
    assert loads.in_flight("a") == 0


def test_the_backlog_is_worked_off_with_time() -> None:
    loads = Loads()
    loads.begin("a", PREFILL_TOKENS_PER_SECOND, now=0.0)
    assert loads.backlog_tokens("a", 0.5) == PREFILL_TOKENS_PER_SECOND / 2
    assert loads.backlog_tokens("a", 9.0) == 0.0
    assert loads.backlog_tokens("b", 0.0) == 0.0


def test_a_request_that_is_over_leaves_no_backlog() -> None:
    loads = Loads()
    long = loads.begin("a", 10_000, now=0.0)
    loads.begin("a", 50, now=0.0)
    loads.end(long)
    assert loads.backlog_tokens("a", 0.0) == 50


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.floats(0, 1e5)), max_size=60))
def test_whatever_begins_and_ends_counts_stay_true(
    steps: list[tuple[bool, int, float]],
) -> None:
    loads, open_bookings = Loads(), list[Booking]()
    for now, (begins, number, tokens) in enumerate(steps):
        if begins or not open_bookings:
            open_bookings.append(loads.begin(str(number), tokens, float(now)))
        else:
            loads.end(open_bookings.pop(number % len(open_bookings)))
        for endpoint in "012":
            mine = [one for one in open_bookings if one.endpoint == endpoint]
            assert loads.in_flight(endpoint) == len(mine)
            total = sum(one.uncached_tokens for one in mine)
            assert 0.0 <= loads.backlog_tokens(endpoint, float(now)) <= total + 1e-6
