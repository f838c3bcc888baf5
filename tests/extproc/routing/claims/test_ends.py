from array import array

from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.claims.claim_table import ClaimTable, Holdings
from extproc.routing.claims.ends import ASKING_TOKENS, end_of_tokens
from extproc.routing.claims.homes import ENDS_OF_MARK, Homes, Turn
from extproc.routing.claims.marks import FIRST_TOKENS, Marks
from kvstate.overlap import Prompt

SENT = ClaimTable(1)


def marks(*tokens: int) -> tuple[Marks, "array[int]"]:
    prompt = array("I", tokens)
    return SENT.marks(Prompt("m", prompt)), prompt


def remembered(homes: Homes, *tokens: int, worker: str = "a") -> int:
    """The key under which a prompt is remembered, 0 if it is too short."""
    end = homes.end_of(*marks(*tokens))
    if end is None:
        return 0
    homes.turn(Turn((end.key,), end=end), Holdings(worker), 1.0)
    return end.key


@given(st.integers(0, 3_000), st.integers(0, 500))
def test_end_of_a_prompt_is_among_those_of_every_longer_one(length: int, more: int) -> None:
    homes, prompt = Homes(1), range(length)
    key = remembered(homes, *prompt)
    assert bool(key) == (length >= FIRST_TOKENS + ASKING_TOKENS)
    assert (key in homes.ends_in(*marks(*prompt, *range(5_000, 5_000 + more)))) == bool(key)


def test_end_is_found_though_the_next_prompt_writes_the_last_tokens_otherwise() -> None:
    homes = Homes(1)
    key = remembered(homes, *range(1_000), *[7] * ASKING_TOKENS)
    assert key in homes.ends_in(*marks(*range(1_000), *[8] * 300))


def test_prompts_that_differ_behind_their_last_mark_are_different_conversations() -> None:
    homes, system = Homes(1), range(20_000)
    one = remembered(homes, *system, *[1] * 300)
    other = remembered(homes, *system, *[2] * 300)
    assert one != other
    found = homes.find(homes.ends_in(*marks(*system, *[2] * 300, *[3] * 900)), 2.0)
    assert found == ("a", other)
    assert homes.find(homes.ends_in(*marks(*system, *[4] * 900)), 2.0) == ("", 0)


def test_ends_behind_one_mark_are_bounded_and_the_latest_are_found() -> None:
    homes, system = Homes(1, most=ENDS_OF_MARK), range(20_000)
    keys = [remembered(homes, *system, *[1] * (100 + n)) for n in range(ENDS_OF_MARK + 4)]
    found = list(homes.ends_in(*marks(*system, *[1] * 900)))
    assert set(found) == set(keys[4:])
    for number in range(3 * ENDS_OF_MARK):
        remembered(homes, *range(number, number + 200))
    assert list(homes.ends_in(*marks(*system, *[1] * 900))) == []


def test_prompt_that_is_shorter_than_a_known_one_does_not_go_on_from_it() -> None:
    homes, system = Homes(1), range(20_000)
    longer, shorter = remembered(homes, *system, *[1] * 300), remembered(homes, *system, *[1] * 60)
    found = list(homes.ends_in(*marks(*system, *[1] * 90)))
    assert (shorter in found, longer in found) == (True, False)


def test_prompt_of_less_than_a_mark_has_no_end() -> None:
    assert end_of_tokens(*marks(*range(FIRST_TOKENS + ASKING_TOKENS - 1))) is None
    assert end_of_tokens(*marks()) is None
