"""Who waits for room: in order, in turns, and with a place that is kept."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.claims.line import NO_PLACE, RETURN_SECONDS, Line

BOUND = 10.0
EVERYTHING = float("inf")


def keys_let_in(line: Line, room: float = EVERYTHING) -> Sequence[int]:
    return [one.key for one in line.let_in(room)]


def joined(*requests: tuple[int, str], level: int = 0, most: int = 200) -> Line:
    """A line of requests, each with its key and tenant, that need a token each."""
    line = Line(BOUND, most)
    for key, tenant in requests:
        line.join(key, 1.0, level, ord(tenant), 0.0)
    return line


@given(st.lists(st.integers(1, 50), unique=True), st.integers(0, 60))
def test_requests_of_one_tenant_go_on_in_the_order_in_which_they_came(
    keys: list[int], room: int
) -> None:
    line = joined(*((key, " ") for key in keys))
    assert keys_let_in(line, room) == keys[:room]
    assert len(line) == line.places == len(keys[room:])


def test_tenants_take_turns() -> None:
    line = joined((1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "b"), (6, "c"))
    assert keys_let_in(line) == [1, 4, 6, 2, 5, 3]


@given(st.lists(st.sampled_from("abc"), max_size=40), st.sampled_from("abc"))
def test_tenant_that_has_nothing_in_the_line_waits_for_one_of_each_other(
    before: list[str], tenant: str
) -> None:
    line = joined(*((key, name) for key, name in enumerate(before, 1) if name != tenant))
    line.join(100, 1.0, 0, ord(tenant), 0.0)
    assert keys_let_in(line).index(100) <= len(set(before) - {tenant})


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_tenant_that_asks_again_and_again_gets_every_other_turn_at_most(asks: list[bool]) -> None:
    line = joined(*((key, "a") for key in range(100)))
    went: list[int] = []
    for key, does_ask in enumerate([*asks, True, True, True], 100):
        went += keys_let_in(line, 1.0)
        if does_ask:
            line.join(key, 1.0, 0, ord("b"), float(key))
    assert [one >= 100 for one in went].count(True) <= len(went) / 2


@given(st.integers(0, 9))
def test_who_gives_up_a_place_brings_no_tenant_behind_another(given_up: int) -> None:
    line = joined(*((key, "a") for key in range(10)))
    line.remove([*line.waiting()][given_up])
    line.join(100, 1.0, 0, ord("b"), 1.0)
    assert keys_let_in(line).index(100) == 1


def test_turns_of_one_class_are_none_of_another() -> None:
    line = joined(*((key, "a") for key in range(10)), level=1)
    for key, tenant in ((100, "b"), (101, "b"), (102, "a")):
        line.join(key, 1.0, 0, ord(tenant), 1.0)
    assert keys_let_in(line)[:3] == [100, 102, 101]


def test_class_that_goes_first_overtakes() -> None:
    line = joined((1, " "), (2, " "), level=1)
    line.join(3, 1.0, 0, 0, 0.0)
    assert keys_let_in(line) == [3, 1, 2]


def test_first_that_needs_more_than_there_is_keeps_others_back() -> None:
    line = Line(BOUND, 100)
    line.join(1, 5.0, 0, 0, 0.0)
    line.join(2, 1.0, 0, 0, 0.0)
    assert keys_let_in(line, 4.0) == []
    assert keys_let_in(line, 6.0) == [1, 2]


@given(st.lists(st.floats(1.0, 1e9), min_size=1, max_size=9), st.floats(1.0, 1e9))
def test_first_goes_on_once_enough_is_free_however_much_it_needs(
    needs: list[float], enough: float
) -> None:
    line = Line(BOUND, 100)
    for key, tokens in enumerate(needs):
        line.join(key, tokens, 0, 0, float(key))
    assert 0 in [one.key for one in line.let_in(enough, enough)]


def test_who_leaves_and_comes_again_keeps_the_place() -> None:
    line = joined((1, " "), (2, " "))
    (first, _) = line.waiting()
    line.leave(first, 3.0)
    assert (len(line), line.places) == (1, 2)
    again = line.join(1, 1.0, 0, 0, 5.0)
    assert (again.order, again.until) == (first.order, 5.0 + BOUND)
    assert keys_let_in(line) == [1, 2]


def test_nobody_waits_for_who_has_left() -> None:
    line = joined((1, " "), (2, " "))
    line.leave(next(line.waiting()), 3.0)
    assert keys_let_in(line) == [2]
    assert line.overdue(3.0 + BOUND) == []
    assert line.places == 0


def test_request_that_is_sent_twice_waits_twice_in_one_place() -> None:
    line = joined((1, " "), (2, " "), (1, " "))
    assert keys_let_in(line) == [1, 1, 2]
    assert line.places == 0


def test_waits_end_at_the_bound() -> None:
    line = joined((1, " "))
    assert line.overdue(BOUND - 0.1) == []
    (late,) = line.overdue(BOUND)
    line.remove(late)
    assert late not in line


def test_line_has_room_for_so_many() -> None:
    line = joined((1, " "), (2, " "), (3, " "), most=2)
    assert line.join(4, 1.0, 0, 0, 0.0) is NO_PLACE
    assert keys_let_in(line) == [1, 2]


def test_places_of_those_who_do_not_come_again_keep_nobody_out() -> None:
    line = Line(4 * RETURN_SECONDS, 3)
    for key in (1, 2, 3):
        line.leave(line.join(key, 1.0, 0, 0, 0.0), float(key))
    assert line.join(4, 1.0, 0, 0, RETURN_SECONDS) is NO_PLACE
    assert line.join(4, 1.0, 0, 0, RETURN_SECONDS + 2.0) is not NO_PLACE
    again = [line.join(key, 1.0, 0, 0, RETURN_SECONDS + 2.5) for key in (3, 2, 1)]
    assert [place is NO_PLACE for place in again] == [False, False, True]


@given(st.floats(0.0, 100.0), st.lists(st.floats(0.0, 1_000.0), max_size=10))
def test_one_that_needs_more_than_most_goes_on_with_room_for_that(
    room: float, needs: list[float]
) -> None:
    line = Line(BOUND, 100)
    for key, tokens in enumerate(needs, 1):
        line.join(key, tokens, 0, 0, 0.0)
    went = line.let_in(room, 10.0)
    assert len(went) >= min(len(needs), room // 10)
    assert sum(min(one.tokens, 10.0) for one in went) <= room + 1e-6


def test_one_tenant_does_not_take_all_places() -> None:
    line = Line(BOUND, 4, most_of_tenant=2)
    places = [line.join(key, 1.0, 0, tenant, 0.0) for key, tenant in ((1, 7), (2, 7), (3, 7))]
    assert [place is NO_PLACE for place in places] == [False, False, True]
    assert line.join(4, 1.0, 0, 8, 0.0) is not NO_PLACE


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.sampled_from("ab"))))
def test_line_is_bounded_and_empty_in_the_end(steps: list[tuple[int, int, str]]) -> None:
    line, now = Line(BOUND, 8), 0.0
    for what, key, tenant in steps:
        now += 1.0
        if what <= 1:
            line.join(key, float(key), 0, ord(tenant), now)
        elif what == 2:
            line.let_in(float(key))
        elif what == 3 and len(line):
            line.leave(next(line.waiting()), now)
        else:
            line.overdue(now)
        assert len(line) <= line.places <= 8
    now += 2 * BOUND
    for late in line.overdue(now):
        line.remove(late)
    assert (len(line), line.places, keys_let_in(line)) == (0, 0, [])
