"""Which requests are looked up, how many and when, and what is read from the answer."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from extproc.proof.lookups import (
    GRACE_SECONDS,
    MAX_LONG,
    MAX_PROMPT_TOKENS,
    MAX_SECONDS,
    MAX_WAITING,
    PAUSE_SECONDS,
    Lookups,
    SentRequest,
    has_published,
    is_stored,
    may_show,
)
from extproc.requests.prompt import TEXT
from kvstate.overlap import Overlap, Prompt, Tokens

SIZE = 16


def prompt(tokens: int) -> Prompt:
    return Prompt("m", Tokens("I", range(tokens)))


def sent(tokens: int = 65, held: int = 0, at: float = 0.0) -> SentRequest:
    return SentRequest(prompt(tokens), TEXT, held, batches=5, sent_at=at)


def overlap(blocks: int, uncertain: int = 0) -> Overlap:
    return Overlap(SIZE, (blocks, 0, 0, 0), uncertain)


def test_prompt_is_stored_if_all_usable_blocks_are_held() -> None:
    for held in (overlap(4), overlap(3, 1)):
        assert is_stored(sent(), held, 6, SIZE, 1.0, was_stored=False) is True
        assert is_stored(sent(), held, 6, SIZE, 1.0, was_stored=None) is True


def test_prompt_is_stored_if_its_last_block_was_though_it_is_gone() -> None:
    assert is_stored(sent(), None, 6, SIZE, 1.0, was_stored=True) is True


def test_prompt_is_not_stored_if_its_last_block_was_not_though_something_was() -> None:
    assert is_stored(sent(), overlap(3), 6, SIZE, 1.0, was_stored=False) is False
    assert is_stored(sent(), None, 6, SIZE, 1.0, was_stored=False) is False


def test_is_stored_is_none_without_stored_or_usable_blocks_or_a_watch() -> None:
    assert is_stored(sent(), None, 5, SIZE, 1.0, was_stored=False) is None
    assert is_stored(sent(), None, 6, None, 1.0, was_stored=None) is None
    assert is_stored(sent(), None, 6, SIZE, 1.0, was_stored=None) is None
    assert is_stored(sent(SIZE), None, 6, SIZE, 1.0, was_stored=False) is None
    assert is_stored(sent(held=64), overlap(4), 6, SIZE, 1.0, was_stored=True) is None


def test_requests_that_wait_have_different_slots() -> None:
    lookups, slots = Lookups(), list[int]()
    for _ in range(MAX_WAITING):
        slots.append(lookups.free_slot())
        one = sent()
        one.slot = slots[-1]
        lookups.add(one, is_proved=False)
    assert slots == list(range(MAX_WAITING))
    lookups.drop(one)
    assert lookups.free_slot() == MAX_WAITING - 1


def answered(tokens: int = 65, held: int = 0) -> SentRequest:
    return SentRequest(prompt(tokens), TEXT, held, 5, 0.0, live_batches=3, is_answered=True)


def test_feed_told_of_a_prompt_if_anything_came_that_can_be_used() -> None:
    assert has_published(answered(), 4, SIZE, is_read=True) is True
    assert has_published(answered(), 4, SIZE, is_read=False) is False
    assert has_published(answered(), 3, SIZE, is_read=True) is False


def test_feed_need_not_tell_of_prompts_without_an_answer_or_a_new_block() -> None:
    assert has_published(sent(), 0, SIZE, is_read=False) is None
    assert has_published(answered(SIZE), 3, SIZE, is_read=True) is None
    assert has_published(answered(held=64), 3, SIZE, is_read=True) is None


def test_prompt_may_show_tokens_unless_it_is_cached_short_or_long() -> None:
    assert may_show(prompt(65), None, SIZE)
    assert may_show(prompt(65), overlap(3), SIZE)
    assert may_show(prompt(3), None, None)
    assert not may_show(prompt(65), overlap(4), SIZE)
    assert not may_show(prompt(SIZE), None, SIZE)
    assert not may_show(prompt(MAX_PROMPT_TOKENS + 1), None, SIZE)


def test_request_that_is_put_back_waits_behind_the_others() -> None:
    lookups, one, other = Lookups(), sent(), sent()
    one.ended_at = other.ended_at = 0.0
    for each in (one, other):
        lookups.add(each, is_proved=False)
    assert lookups.take_due(GRACE_SECONDS) is one
    lookups.put_back(one)
    assert [lookups.take_due(GRACE_SECONDS) for _ in range(2)] == [other, one]


def test_request_is_due_once_after_its_end_and_the_grace() -> None:
    lookups, one = Lookups(), sent()
    lookups.add(one, is_proved=False)
    assert lookups.take_due(GRACE_SECONDS) is None
    one.ended_at = 1.0
    assert lookups.take_due(1.0) is None
    assert lookups.take_due(1.0 + GRACE_SECONDS) is one
    assert lookups.take_due(1.0 + GRACE_SECONDS) is None


def test_long_request_shows_only_that_it_was_stored() -> None:
    one = sent()
    one.ended_at = MAX_SECONDS
    after = MAX_SECONDS + 1
    assert is_stored(one, overlap(4), 6, SIZE, after, was_stored=False) is True
    assert is_stored(one, overlap(3), 6, SIZE, after, was_stored=False) is None
    one.ended_at = MAX_SECONDS - 1
    assert is_stored(one, overlap(3), 6, SIZE, after, was_stored=False) is False


def test_long_request_is_due_after_its_end() -> None:
    lookups, one = Lookups(), sent()
    lookups.add(one, is_proved=False)
    assert lookups.take_due(100 * MAX_SECONDS) is None
    one.ended_at = 100 * MAX_SECONDS
    assert lookups.take_due(one.ended_at + GRACE_SECONDS) is one


def test_request_that_nobody_looked_up_after_its_end_is_given_up() -> None:
    lookups, one = Lookups(), sent()
    lookups.add(one, is_proved=False)
    one.ended_at = 1.0
    assert lookups.take_due(1.0 + MAX_SECONDS) is None
    assert len(lookups) == 0


def test_requests_that_never_end_leave_room_for_others() -> None:
    lookups = Lookups()
    endless = [sent(at=float(at)) for at in range(MAX_WAITING)]
    for one in endless:
        lookups.add(one, is_proved=False)
    assert not lookups.has_room(8.0)
    assert not lookups.is_open(8.0, is_proved=False)
    assert lookups.is_open(8.0 + PAUSE_SECONDS, is_proved=False)
    assert lookups.take_due(MAX_SECONDS + MAX_WAITING) is None
    assert len(lookups) == MAX_LONG
    endless[0].ended_at = 1_000.0  # the first ones are kept
    assert lookups.take_due(1_000.0 + GRACE_SECONDS) is endless[0]


def test_restart_gives_up_all_requests_and_the_next_comes_at_once() -> None:
    lookups = Lookups()
    lookups.add(sent(at=9.0), is_proved=True)
    lookups.restart()
    assert (len(lookups), lookups.is_open(9.0, is_proved=True)) == (0, True)
    lookups.drop(sent())  # which waits no more


def eighths(least: float, most: float) -> st.SearchStrategy[float]:
    """Seconds of which sums and differences are exact, as those of any floats are not."""
    return st.integers(int(8 * least), int(8 * most)).map(lambda number: number / 8)


SECONDS = eighths(0.0, 2.0) | st.sampled_from([MAX_SECONDS / 4, MAX_SECONDS])
STEPS = st.lists(
    st.tuples(st.sampled_from(["send", "end", "drop", "look"]), SECONDS, st.booleans()),
    max_size=80,
)


@given(STEPS)
def test_requests_that_wait_and_are_looked_up_are_few(
    steps: list[tuple[str, float, bool]],
) -> None:
    lookups, going, now, looked, added = Lookups(), list[SentRequest](), 0.0, 0, list[float]()
    for kind, seconds, is_proved in steps:
        now += seconds
        if kind == "send" and lookups.is_open(now, is_proved=is_proved) and lookups.has_room(now):
            going.append(sent(at=now))
            lookups.add(going[-1], is_proved=is_proved)
            added.append(now)
        elif kind == "end" and going:
            going.pop(0).ended_at = now
        elif kind == "drop" and going:
            lookups.drop(going.pop(0))
        elif kind == "look":
            taken = lookups.take_due(now)
            looked += taken is not None
            assert taken is None or GRACE_SECONDS <= now - (taken.ended_at or now) < MAX_SECONDS
            waiting = [one for one in going if one.is_long(now)]
            assert len(lookups) <= MAX_WAITING - max(0, len(waiting) - MAX_LONG)
        assert len(lookups) <= MAX_WAITING
        assert looked <= len(added) <= 1 + now / PAUSE_SECONDS
    assert all(later - one >= PAUSE_SECONDS for one, later in itertools.pairwise(added))


@given(st.integers(0, 2 * MAX_WAITING), eighths(GRACE_SECONDS, 20 * MAX_SECONDS))
def test_request_is_looked_up_among_any_number_that_never_end(
    endless: int, lasts_seconds: float
) -> None:
    lookups, now = Lookups(), 0.0
    for _ in range(endless):
        if lookups.has_room(now):
            lookups.add(sent(at=now), is_proved=False)
        now += PAUSE_SECONDS
    while True:
        lookups.take_due(now)
        if lookups.has_room(now):
            break
        now += PAUSE_SECONDS
    one = sent(at=now)
    lookups.add(one, is_proved=False)
    one.ended_at = now + min(lasts_seconds, MAX_SECONDS / 2 if endless else lasts_seconds)
    assert lookups.take_due(one.ended_at + GRACE_SECONDS) is one
