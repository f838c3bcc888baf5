from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.outline import beginning_of
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.ends import end_of_text, ends_in_text
from extproc.routing.claims.homes import HOME_SECONDS, Homes, Turn
from extproc.routing.claims.live_contexts import LIVE_SECONDS, Context
from extproc.routing.claims.marks import NO_MARKS, marks_of_outline, unpacked


def test_home_is_the_worker_of_the_last_request() -> None:
    homes, a, b = Homes(1), Holdings("a"), Holdings("b")
    homes.note((7, 8), a, 0.0)
    homes.note((8,), b, 1.0)
    assert [homes.find_worker((key,), 2.0) for key in (7, 8, 9)] == ["a", "b", ""]
    assert homes.find_worker((9, 8, 7), 2.0) == "b"


def test_home_is_forgotten_when_its_request_was_not_computed() -> None:
    homes = Homes(1)
    homes.note((7,), Holdings("a"), 0.0)
    homes.forget((7, 8))
    assert homes.find_worker((7,), 0.0) == ""


def test_worker_that_lost_its_cache_is_no_home() -> None:
    homes, a = Homes(1), Holdings("a")
    homes.note((7,), a, 1.0)
    a.lose(2.0)
    assert homes.find_worker((7,), 3.0) == ""
    homes.note((7,), a, 4.0)
    assert homes.find_worker((7,), 5.0) == "a"
    assert homes.find_worker((7,), 4.0 + HOME_SECONDS) == ""


@given(st.lists(st.integers(0, 30), max_size=80), st.integers(1, 9))
def test_homes_are_never_more_than_their_limit(keys: list[int], most: int) -> None:
    homes = Homes(1, most)
    for key in keys:
        homes.note((key,), Holdings(str(key)), 0.0)
    latest = list(dict.fromkeys(reversed(keys)))
    assert len(homes) == min(most, len(latest))
    assert [homes.find_worker((key,), 0.0) for key in latest[:most]] == [
        str(key) for key in latest[:most]
    ]
    assert all(homes.find_worker((key,), 0.0) == "" for key in latest[most:])


def test_name_has_another_key_for_another_model_kind_and_secret() -> None:
    homes = Homes(1)
    keys = {
        homes.key("session", "m", None, "x"),
        homes.key("session", "n", None, "x"),
        homes.key("session", "m", "l", "x"),
        homes.key("response", "m", None, "x"),
        Homes(2).key("session", "m", None, "x"),
    }
    assert len(keys) == 5


@given(st.binary(min_size=64, max_size=3_000), st.binary(min_size=64, max_size=3_000))
def test_end_of_a_conversation_is_among_those_of_its_next_turn(text: bytes, more: bytes) -> None:
    one = beginning_of(text)
    marks = marks_of_outline(1, one)
    end = end_of_text(marks)
    assert end is not None
    assert end.key in ends_in_text(marks)
    longer = marks_of_outline(1, beginning_of(text + more))
    keys, others = unpacked(marks.keys), unpacked(longer.keys)
    common = sum(key == other for key, other in zip(keys, others, strict=False))
    same = ends_in_text(longer)[len(others) - common :]
    assert set(ends_in_text(longer)) & set(ends_in_text(marks)) == set(same)


def test_short_conversation_has_no_end() -> None:
    assert end_of_text(NO_MARKS) is None


def live(worker: Holdings, now: float) -> float:
    """How many conversations count at a worker."""
    worker.contexts.expire(now)
    return worker.contexts.once + worker.contexts.returned


def test_conversation_counts_only_at_the_worker_of_its_last_request() -> None:
    homes, a, b = Homes(1), Holdings("a"), Holdings("b")
    homes.turn(Turn((7, 70), 0), a, 1.0)
    homes.turn(Turn((8, 70), 7), a, 2.0)
    assert (live(a, 2.0), live(b, 2.0)) == (
        1,
        0,
    )
    homes.turn(Turn((9, 70), 8), b, 3.0)
    assert (live(a, 3.0), live(b, 3.0)) == (
        0,
        1,
    )
    homes.turn(Turn((9, 70), 0), a, 4.0)  # served elsewhere
    assert (live(a, 4.0), live(b, 4.0)) == (
        1,
        0,
    )
    homes.turn(Turn((10,), 7), b, 5.0)  # another one went on from the first request
    assert (live(a, 5.0), live(b, 5.0)) == (
        1,
        1,
    )
    homes.forget((9,))
    assert live(a, 5.0) == 0
    assert homes.find((9, 7), 5.0) == ("a", 7)


def test_worker_that_lost_its_cache_has_no_conversation() -> None:
    homes, a = Homes(1), Holdings("a")
    homes.turn(Turn((7,), 0), a, 1.0)
    a.lose(2.0)
    homes.turn(Turn((8,), 0), a, 3.0)
    homes.turn(Turn((9,), 7), a, 4.0)
    assert live(a, 4.0) == 2
    a.lose()
    homes.turn(Turn((10,), 9), a, 5.0)
    homes.forget((10,))
    assert live(a, 5.0) == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.sampled_from("ab")), max_size=60),
    st.integers(1, 6),
)
def test_conversations_of_all_workers_are_never_more_than_homes(
    turns: list[tuple[int, int, str]], most: int
) -> None:
    homes, workers = Homes(1, most), {name: Holdings(name) for name in "ab"}
    for key, follows, name in turns:
        homes.turn(Turn((key,), follows), workers[name], 1.0)
        counts = [live(each, 1.0) for each in workers.values()]
        assert min(counts) >= 0
        assert 1 <= sum(counts) <= len(homes)


def test_conversation_counts_by_its_latest_request_and_while_it_lives() -> None:
    homes, a, context = Homes(1), Holdings("a"), Context(500.0)
    homes.turn(Turn((7,), context=context), a, 1.0)
    assert homes.counted(7, 2.0) == context
    homes.turn(Turn((8,), 7, context.grown_to(900.0)), a, 3.0)
    assert homes.counted(7, 4.0) is None
    assert homes.counted(8, 4.0) == Context(900.0, has_returned=True)
    assert homes.counted(8, 3.0 + LIVE_SECONDS) is None
    assert homes.counted(0, 4.0) is None


def _begin(homes: Homes, keys: range, *, returns: bool) -> float:
    """Has conversations begin, and return if they do; the share that is taken to return then."""
    for key in keys:
        homes.turn(Turn((key,)), Holdings("a"), 0.0)
        if returns:
            grown = homes.grown(key, 100.0)
            homes.turn(Turn((1_000_000 + key,), key, grown), Holdings("a"), 1.0)
    return homes.returning


@given(st.integers(0, 30))
def test_burst_of_those_that_begin_changes_little_of_how_many_are_taken_to_return(
    count: int,
) -> None:
    assert _begin(Homes(1), range(1, 1 + count), returns=False) >= 0.8


def test_after_hundreds_that_do_not_return_none_is_taken_to() -> None:
    homes = Homes(1)
    assert _begin(homes, range(1, 601), returns=False) < 0.02
    assert _begin(homes, range(1_001, 1_601), returns=True) > 0.98


@given(st.integers(0, 400))
def test_all_are_taken_to_return_while_all_do(count: int) -> None:
    assert _begin(Homes(1), range(1, 1 + count), returns=True) == 1.0
