"""Who waits for room, as routers tell each other."""

from extproc.routing.claims.line import Line, Place
from tests.extproc.sharing.routers import FORGET_SECONDS, WORKERS, met, tell_all


def only_place(line: Line) -> Place:
    (place,) = line._places
    return place


def test_place_is_known_to_the_other_routers() -> None:
    one, other = routers = met("one", "other")
    one.lines.of("m").join(7, 2_000.0, 1, one.lines.tenant_key("t"), 0.0, follows=3)
    one.lines.note_limit("m", 1.25)
    tell_all(routers, 0.5)
    (place,) = one.lines.of("m").known(0.5)
    known = only_place(other.lines.of("m"))
    assert (known.key, known.follows, known.tokens, known.tenant) == place[:4]
    assert known.order == (1, 1, 0.0)
    assert other.lines.limit("m") == 1.25


def test_place_is_told_once_it_is_taken_and_once_it_is_left() -> None:
    one, other = routers = met("one", "other")
    place = one.lines.of("m").join(7, 2_000.0, 0, 0, 0.0)
    tell_all(routers, 0.0)
    assert other.lines.of("m").is_awaited
    one.lines.of("m").leave(place, 0.1)
    tell_all(routers, 0.1)
    assert not other.lines.of("m").is_awaited
    assert not other.lines.of("m").is_empty


def test_dead_router_keeps_nobody_waiting() -> None:
    one, other = routers = met("one", "other")
    one.lines.of("m").join(7, 2_000.0, 0, 0, 0.0)
    tell_all(routers, 0.0)
    other.others.forget(2 * FORGET_SECONDS)
    assert other.lines.find("m") is None


def test_conversation_that_waits_counts_nowhere() -> None:
    one, other = routers = met("one", "other")
    one.turn([5], 0, WORKERS[0], 0.0)
    tell_all(routers, 0.0)
    assert other.live(WORKERS[0], 0.0) == 1
    one.homes.pause(5)
    one.lines.of("m").join(7, 2_000.0, 0, 0, 0.1, follows=5)
    tell_all(routers, 0.1)
    assert one.live(WORKERS[0], 0.1) == other.live(WORKERS[0], 0.1) == 0
