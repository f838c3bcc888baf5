"""Which requests are looked up, how many and when, and what is read from the answer."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from extproc.proof.lookups import (
    GRACE_SECONDS,
    MAX_PROMPT_TOKENS,
    MAX_SECONDS,
    MAX_WAITING,
    PAUSE_SECONDS,
    Lookups,
    SentRequest,
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
    assert is_stored(sent(), overlap(4), 6, SIZE) is True
    assert is_stored(sent(), overlap(3, 1), 6, SIZE) is True


def test_prompt_is_not_stored_if_a_block_lacks_though_something_was_stored() -> None:
    assert is_stored(sent(), overlap(3), 6, SIZE) is False
    assert is_stored(sent(), None, 6, SIZE) is False


def test_is_stored_is_none_without_stored_or_usable_blocks() -> None:
    assert is_stored(sent(), None, 5, SIZE) is None
    assert is_stored(sent(), None, 6, None) is None
    assert is_stored(sent(SIZE), None, 6, SIZE) is None
    assert is_stored(sent(held=64), overlap(4), 6, SIZE) is None


def test_prompt_may_show_tokens_unless_it_is_cached_short_or_long() -> None:
    assert may_show(prompt(65), None, SIZE)
    assert may_show(prompt(65), overlap(3), SIZE)
    assert may_show(prompt(3), None, None)
    assert not may_show(prompt(65), overlap(4), SIZE)
    assert not may_show(prompt(SIZE), None, SIZE)
    assert not may_show(prompt(MAX_PROMPT_TOKENS + 1), None, SIZE)


def test_request_is_due_once_after_its_end_and_the_grace() -> None:
    lookups, one = Lookups(), sent()
    lookups.add(one, is_proved=False)
    assert lookups.take_due(GRACE_SECONDS) is None
    one.ended_at = 1.0
    assert lookups.take_due(1.0) is None
    assert lookups.take_due(1.0 + GRACE_SECONDS) is one
    assert lookups.take_due(1.0 + GRACE_SECONDS) is None


def test_request_that_takes_too_long_is_given_up() -> None:
    lookups, one = Lookups(), sent()
    lookups.add(one, is_proved=False)
    one.ended_at = MAX_SECONDS
    assert lookups.take_due(MAX_SECONDS + GRACE_SECONDS) is None
    assert len(lookups) == 0


def test_restart_gives_up_all_requests_and_the_next_comes_at_once() -> None:
    lookups = Lookups()
    lookups.add(sent(at=9.0), is_proved=True)
    lookups.restart()
    assert (len(lookups), lookups.is_open(9.0, is_proved=True)) == (0, True)
    lookups.drop(sent())  # which waits no more


STEPS = st.lists(
    st.tuples(st.sampled_from(["send", "end", "drop", "look"]), st.floats(0.0, 2.0), st.booleans()),
    max_size=80,
)


@given(STEPS)
def test_requests_that_wait_and_are_looked_up_are_few(
    steps: list[tuple[str, float, bool]],
) -> None:
    lookups, going, now, looked, added = Lookups(), list[SentRequest](), 0.0, 0, list[float]()
    for kind, seconds, is_proved in steps:
        now += seconds
        if kind == "send" and lookups.is_open(now, is_proved=is_proved):
            going.append(sent(at=now))
            lookups.add(going[-1], is_proved=is_proved)
            added.append(now)
        elif kind == "end" and going:
            going[0].ended_at = now
        elif kind == "drop" and going:
            lookups.drop(going.pop(0))
        elif kind == "look":
            looked += lookups.take_due(now) is not None
        assert len(lookups) <= MAX_WAITING
        assert looked <= len(added) <= 1 + now / PAUSE_SECONDS
    assert all(later - one >= PAUSE_SECONDS for one, later in itertools.pairwise(added))
