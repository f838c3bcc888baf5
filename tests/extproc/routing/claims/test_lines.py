"""One line of several routers: each knows the first places of the others."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.claims.line import NO_PLACE
from extproc.routing.claims.lines import MOST_TOLD, KnownLines, Lines

BOUND = 10.0
EVERYTHING = float("inf")


def sharing(count: int) -> list[Lines]:
    return [Lines(1, BOUND, 1_000) for _ in range(count)]


def tell(routers: Sequence[Lines], now: float) -> None:
    """Has each router tell the others what has changed."""
    for number, router in enumerate(routers):
        known = router.take(now)
        for other in routers:
            if known is not None and other is not router:
                other.learn(str(number), known, now)


def keys_let_in(router: Lines, room: float) -> list[int]:
    return [one.key for one in router.of("m").let_in(room)]


@given(st.lists(st.integers(0, 2), max_size=20))
def test_requests_go_on_in_the_order_in_which_they_came_through_any_router(
    through: list[int],
) -> None:
    routers = sharing(3)
    for key, number in enumerate(through, 1):
        routers[number].of("m").join(key, 1.0, 0, 0, float(key))
        tell(routers, float(key))
    for key, number in enumerate(through, 1):
        for other, router in enumerate(routers):
            assert keys_let_in(router, 1.0) == ([key] if other == number else [])
        tell(routers, 100.0)


def test_room_is_left_for_who_came_before_through_another_router() -> None:
    one, other = routers = sharing(2)
    one.of("m").join(1, 5.0, 0, 0, 0.0)
    other.of("m").join(2, 1.0, 0, 0, 1.0)
    tell(routers, 1.0)
    assert keys_let_in(other, 5.5) == []
    assert keys_let_in(other, 6.0) == [2]
    assert keys_let_in(one, 5.0) == [1]


def test_who_comes_again_through_another_router_keeps_the_place() -> None:
    one, other = routers = sharing(2)
    first = one.of("m").join(1, 1.0, 0, 0, 0.0)
    other.of("m").join(2, 1.0, 0, 0, 1.0)
    one.of("m").leave(first, 2.0)
    tell(routers, 2.0)
    again = other.of("m").join(1, 1.0, 0, 0, 3.0)
    assert (again.order, again.until) == (first.order, 3.0 + BOUND)
    tell(routers, 3.0)
    assert keys_let_in(other, EVERYTHING) == [1, 2]


def test_place_that_was_taken_over_is_told_by_the_router_that_has_it_now() -> None:
    one, other = routers = sharing(2)
    one.of("m").leave(one.of("m").join(1, 1.0, 0, 0, 0.0), 0.0)
    tell(routers, 0.0)
    other.of("m").join(1, 1.0, 0, 0, 1.0)
    one.of("m").join(2, 1.0, 0, 0, 1.0)
    tell(routers, 1.0)  # the first one still tells of the empty place
    assert keys_let_in(one, 1.0) == []
    assert keys_let_in(other, 1.0) == [1]


def test_nobody_waits_for_a_router_that_is_silent() -> None:
    one, other = routers = sharing(2)
    one.of("m").join(1, 1.0, 0, 0, 0.0)
    tell(routers, 0.0)
    assert (other.of("m").is_awaited, other.routers) == (True, 2)
    other.forget("0", 1.0)
    other.forget("0", 1.0)
    assert (other.each(), other.routers) == ([], 1)


def test_lines_of_models_are_apart() -> None:
    one, other = routers = sharing(2)
    one.of("m").join(1, 1.0, 0, 0, 0.0)
    tell(routers, 0.0)
    assert other.find("another") is None
    assert [len(line) for _, line in one.each()] == [1]
    line = other.find("m")
    assert line is not None
    assert (len(line), line.places, line.is_awaited) == (0, 0, True)


def test_limit_is_what_all_have_learned_on_average() -> None:
    one, other = routers = sharing(2)
    assert one.limit("m") == EVERYTHING
    one.note_limit("m", 1.2)
    other.note_limit("m", 1.0)
    tell(routers, 0.0)
    assert one.limit("m") == other.limit("m") == 1.1
    other.forget("0", 1.0)
    assert other.limit("m") == 1.0


def test_what_has_not_changed_is_told_only_in_whole() -> None:
    (one,) = sharing(1)
    assert one.take(0.0) is None
    assert one.take(0.0, is_whole=True) is None
    one.of("m").join(1, 1.0, 0, 0, 0.0)
    assert one.take(0.0) is not None
    assert one.take(0.0) is None
    assert one.take(0.0, is_whole=True) is not None
    one.clear()
    assert (one.take(0.0), one.take(0.0)) == (KnownLines({}, []), None)


def test_only_the_first_places_are_told() -> None:
    (one,) = sharing(1)
    for key in range(2 * MOST_TOLD):
        one.of("m").join(key, 1.0, 0, 0, float(key))
    known = one.take(200.0)
    assert known is not None
    assert [each.place.key for each in known.places] == list(range(MOST_TOLD))


def test_long_line_of_one_model_leaves_room_to_tell_of_another() -> None:
    (one,) = sharing(1)
    for key in range(2 * MOST_TOLD):
        one.of("m").join(key, 1.0, 0, 0, float(key))
    for key in (1_000, 1_001):
        one.of("another").join(key, 1.0, 0, 0, 300.0)
    known = one.take(400.0)
    assert known is not None
    assert {1_000, 1_001} < {each.place.key for each in known.places}
    assert len(known.places) == MOST_TOLD


def test_places_of_other_routers_fill_no_line() -> None:
    one, other = sharing(2)
    for key in range(3):
        one.of("m").join(key, 1.0, 0, 0, 0.0)
    small = Lines(1, BOUND, 1)
    known = one.take(0.0)
    assert known is not None
    small.learn("0", known, 0.0)
    assert small.of("m").join(9, 1.0, 0, 0, 1.0) is not NO_PLACE
    assert small.of("m").join(10, 1.0, 0, 0, 1.0) is NO_PLACE
    assert (len(small), len(other)) == (1, 0)
