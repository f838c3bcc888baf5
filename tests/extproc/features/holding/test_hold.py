"""Who waits for room in the caches, and how waits end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.features.holding.hold import BRIEF_SECONDS, LET_IN, PLACED, REFUSED
from extproc.features.holding.limit import STEP_SECONDS, Limit
from extproc.requests.request_class import RequestClass
from extproc.routing.claims.line import NO_PLACE, KnownPlace
from extproc.routing.claims.lines import KnownLines, ModelPlace
from extproc.routing.claims.live_contexts import LIVE_SECONDS, LiveContexts
from tests.extproc.features.holding.fleets import BOUND, HeldFleet
from tests.extproc.routing.cost.test_room import SYSTEM, conversation


def first(number: int, own: int = 12_000) -> list[int]:
    return list(next(conversation(number, own)))


@pytest.fixture
def fleet() -> HeldFleet:
    """A fleet whose caches are nearly full."""
    made = HeldFleet()
    made.fill()
    return made


def test_nobody_waits_while_there_is_room() -> None:
    fleet = HeldFleet()
    assert fleet.ask(first(1)) is None
    fleet.send(first(1))
    assert (fleet.ask(first(2)), len(fleet.hold)) == (None, 0)


def test_who_begins_waits_while_caches_are_full(fleet: HeldFleet) -> None:
    place = fleet.ask(first(1))
    assert place is not None
    usual = sum(one.contexts.own_returned for one in fleet.holdings.values()) / 3
    assert (place.tokens, fleet.hold.waiting()) == (usual, {"m": 1})
    assert fleet.steps() == []


def test_who_is_held_goes_on_although_others_wait(fleet: HeldFleet) -> None:
    assert fleet.ask(first(1)) is not None
    *_, last = conversation(101, 17_000, 3)
    assert fleet.ask(last) is None


def test_little_that_is_new_goes_on(fleet: HeldFleet) -> None:
    parent = list(conversation(101, 17_000, 2))[-1]
    assert fleet.ask([*parent, *range(900_000, 900_500)]) is None
    assert fleet.ask([*SYSTEM, *range(900_000, 900_900)]) is None


def test_conversation_that_lost_its_cache_waits_and_counts_no_longer(fleet: HeldFleet) -> None:
    fleet.sent["a"].clear()
    assert fleet.live("a")[0] == 1
    assert fleet.ask(list(conversation(101, 17_000, 3))[-1]) is not None
    assert fleet.live("a")[0] == 0


def test_conversation_for_which_there_is_no_place_is_evicted_once_however_often_it_comes() -> None:
    fleet = HeldFleet(most=0)
    fleet.fill()
    fleet.sent["a"].clear()
    *_, last = conversation(101, 17_000, 3)
    assert fleet.ask(last) is NO_PLACE
    share = fleet.limit.evicted_share
    assert fleet.ask(last) is NO_PLACE
    assert (fleet.live("a")[0], fleet.limit.evicted_share) == (0, share / 2)


def test_conversation_whose_worker_drains_waits_unless_another_one_holds_it(
    fleet: HeldFleet,
) -> None:
    *_, last = conversation(101, 17_000, 3)
    fleet.draining = "a"
    place = fleet.ask(last)
    assert place is not None
    fleet.hold.give_up("m", place)
    fleet.sent["b"].append(last)
    assert fleet.ask(last) is None


def test_what_a_conversation_counts_for_at_a_worker_that_drains_is_no_room(
    fleet: HeldFleet,
) -> None:
    fleet.limit.share = 1.2
    fleet.draining = "a"
    assert fleet.ask(list(conversation(101, 17_000, 3))[-1]) is not None


def test_who_came_first_is_let_in_first_when_there_is_room(fleet: HeldFleet) -> None:
    keys = [place.key for number in (1, 2, 3) if (place := fleet.ask(first(number)))]
    fleet.now += LIVE_SECONDS
    assert fleet.steps() == [(key, LET_IN) for key in keys]
    assert len(fleet.hold) == 0


def test_room_is_given_once(fleet: HeldFleet) -> None:
    keys = [place.key for number in range(1, 7) if (place := fleet.ask(first(number)))]
    fleet.holdings["a"].contexts = LiveContexts()
    assert fleet.steps() == [(keys[0], LET_IN)]
    assert fleet.hold.waiting() == {"m": 5}


def test_request_that_needs_more_than_there_ever_is_keeps_nobody_back(fleet: HeldFleet) -> None:
    fleet.limit.share = 0.5
    big, small = fleet.ask(first(1, 70_000)), fleet.ask(first(2))
    assert big is not None
    assert small is not None
    for one in fleet.holdings.values():
        one.contexts = LiveContexts()
    assert fleet.steps() == [(big.key, LET_IN), (small.key, LET_IN)]


def test_those_who_reach_the_bound_go_on_a_few_at_a_time_or_are_refused(fleet: HeldFleet) -> None:
    keys = [place.key for number in (1, 2) if (place := fleet.ask(first(number)))]
    fleet.now += BOUND
    assert fleet.steps() == [(keys[0], PLACED), (keys[1], REFUSED)]
    again = fleet.ask(first(2))
    assert again is not None
    assert (again.key, again.is_away, fleet.hold.waiting()) == (keys[1], False, {"m": 1})


def test_who_does_not_come_again_is_forgotten(fleet: HeldFleet) -> None:
    for number in (1, 2):
        fleet.ask(first(number))
    fleet.now += BOUND
    fleet.steps()
    fleet.now += BOUND
    assert (fleet.steps(), len(fleet.hold)) == ([], 0)


def test_nobody_waits_where_it_is_not_known_what_lives(fleet: HeldFleet) -> None:
    place = fleet.ask(first(1))
    assert place is not None
    fleet.is_known = False
    fleet.now += BRIEF_SECONDS
    assert fleet.ask(first(2)) is None
    assert fleet.steps() == [(place.key, LET_IN)]


def test_feed_that_is_cut_for_a_moment_lets_nobody_in(fleet: HeldFleet) -> None:
    assert fleet.ask(first(1)) is not None
    fleet.is_known = False
    fleet.now += BRIEF_SECONDS / 2
    assert (fleet.steps(), fleet.ask(first(2)) is not None) == ([], True)
    *_, last = conversation(101, 17_000, 3)
    assert fleet.ask(last) is None
    fleet.is_known = True
    fleet.now += LIVE_SECONDS
    assert [outcome for _, outcome in fleet.steps()] == [LET_IN, LET_IN]


def test_nobody_waits_for_workers_without_events(fleet: HeldFleet) -> None:
    fleet.holdings["a"].is_blind = True
    assert fleet.ask(first(1)) is None


def test_nobody_waits_while_other_routers_are_not_heard(fleet: HeldFleet) -> None:
    place = fleet.ask(first(1))
    assert place is not None
    fleet.lines.is_current = False
    fleet.now += BRIEF_SECONDS
    assert fleet.ask(first(2)) is None
    assert fleet.steps() == [(place.key, LET_IN)]


def test_fewer_go_on_at_the_bound_if_several_routers_have_a_line(fleet: HeldFleet) -> None:
    for router in map(str, range(7)):
        fleet.lines.learn(router, KnownLines({}, ()), fleet.now)
    assert [fleet.ask(first(number)) is not None for number in range(1, 7)] == [True] * 6
    fleet.now += BOUND
    assert [outcome for _, outcome in fleet.steps()] == [PLACED, *[REFUSED] * 5]
    assert [fleet.ask(first(number)) is not None for number in range(1, 7)] == [True] * 6
    fleet.now += BOUND
    assert [outcome for _, outcome in fleet.steps()] == [REFUSED] * 6


HUGE = st.integers(0, 2**32 - 1)
PLACES = st.lists(
    st.builds(
        KnownPlace,
        key=HUGE,
        follows=HUGE,
        tokens=HUGE.map(float),
        tenant=st.integers(0, 3),
        level=st.integers(0, 2),
        turn=HUGE,
        waited_seconds=HUGE.map(float),
        is_away=st.booleans(),
    ),
    max_size=8,
)


@settings(max_examples=40)
@given(PLACES, st.none() | st.floats(0.0, 4.0))
def test_whatever_another_router_tells_nobody_waits_beyond_the_bound(
    places: list[KnownPlace], share: float | None
) -> None:
    fleet = HeldFleet()
    fleet.fill()
    line = fleet.lines.of("m")
    key = fleet.lines._key("m")
    told = KnownLines(
        {} if share is None else {key: share}, [ModelPlace(key, one) for one in places]
    )
    asked = [fleet.ask(first(number)) for number in (1, 2)]
    fleet.lines.learn("liar", told, fleet.now)
    waiting = {place.key for place in asked if place is not None}
    ended = [key for key, _ in fleet.steps()]
    fleet.now += BOUND
    ended += [key for key, _ in fleet.steps()]
    assert set(ended) == waiting
    fleet.lines.forget("liar", fleet.now)
    assert all(not place.router for place in line._places)


def test_first_of_each_line_go_on_when_they_are_told_to(fleet: HeldFleet) -> None:
    keys = [place.key for number in range(1, 7) if (place := fleet.ask(first(number)))]
    went = [(place.key, outcome) for _, place, outcome in fleet.hold.go_on(0.4)]
    assert went == [(key, PLACED) for key in keys[:3]]
    assert len([*fleet.hold.go_on(1.0)]) == 3
    assert (len(fleet.hold), [*fleet.hold.go_on(1.0)]) == (0, [])


def test_line_is_bounded() -> None:
    fleet = HeldFleet(most=1)
    fleet.fill()
    assert fleet.ask(first(1)) is not NO_PLACE
    assert fleet.ask(first(2)) is NO_PLACE


def test_who_left_keeps_the_place_and_who_does_not_wait_gives_it_up(fleet: HeldFleet) -> None:
    left, given_up = fleet.ask(first(1)), fleet.ask(first(2))
    assert left is not None
    assert given_up is not None
    fleet.hold.leave("m", left, fleet.now)
    fleet.hold.give_up("m", given_up)
    assert (fleet.hold.waiting(), len(fleet.hold)) == ({"m": 0}, 1)
    fleet.hold.give_up("m", given_up)
    fleet.hold.leave("other", left, fleet.now)
    assert len(fleet.hold) == 1


def test_classes_wait_in_the_order_of_their_priorities(fleet: HeldFleet) -> None:
    keys = []
    for number, level in ((1, 1), (2, 0)):
        of_class = RequestClass(str(level), level, level, None)
        decision = replace(fleet.decide(first(number)), of_class=of_class)
        place = fleet.hold.place_of(decision, fleet.now)
        assert place is not None
        keys.append(place.key)
    fleet.is_known = False
    fleet.now += BRIEF_SECONDS
    assert [key for key, _ in fleet.steps()] == keys[::-1]


def test_only_requests_of_named_classes_wait() -> None:
    fleet = HeldFleet(classes=["batch"])
    fleet.fill()
    assert fleet.ask(first(1)) is None
    for name, waits in (("people", False), ("batch", True)):
        of_class = RequestClass(name, 0, 0, None)
        decision = replace(fleet.decide(first(1)), of_class=of_class)
        assert (fleet.hold.place_of(decision, fleet.now) is not None) == waits


def test_nobody_waits_before_live_conversations_evict_each_other() -> None:
    fleet = HeldFleet()
    fleet.limit.share = Limit().share
    fleet.fill()
    assert fleet.ask(first(1)) is None
    fleet.sent["a"].clear()
    for _ in range(2):
        fleet.now += STEP_SECONDS
        fleet.ask(list(conversation(101, 17_000, 3))[-1])
    assert fleet.limit.share < 1.0
    assert fleet.ask(first(1)) is not None


def test_prompt_that_is_too_short_to_be_found_again_goes_on(fleet: HeldFleet) -> None:
    assert fleet.ask(range(20)) is None


def test_all_places_can_be_given_up(fleet: HeldFleet) -> None:
    assert fleet.ask(first(1)) is not None
    fleet.hold.clear()
    assert (fleet.steps(), fleet.hold.waiting()) == ([], {"m": 0})


def test_unsteered_requests_go_on(fleet: HeldFleet) -> None:
    decision = replace(fleet.decide(first(1)), is_steered=False)
    assert fleet.hold.place_of(decision, fleet.now) is None
