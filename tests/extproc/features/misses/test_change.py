from array import array
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.features.misses import change
from extproc.features.misses.change import (
    FEW_TOKENS,
    MOST_PLACES,
    WINDOW,
    Kind,
    difference,
    found_share,
    kind_of,
)
from kvstate.overlap import Tokens, shared_tokens


def letters(text: str) -> Tokens:
    """One token for each letter."""
    return array("I", [ord(letter) for letter in text])


def text_of(tokens: Tokens) -> str:
    return "".join(map(chr, tokens))


def kind(old: str, new: str, *, is_turn: bool = False, is_written: bool = True) -> Kind:
    before, now = letters(old), letters(new)
    seen = difference(before, now, shared_tokens(before, now))
    return kind_of(seen, before, now, text_of, is_turn=is_turn, is_written=is_written)


HEAD, TAIL = "You are an agent that helps. ", " What follows stays as it always was, word by word."
FIRST, SECOND = "a first tool that reads what is there; ", "another tool, to write it down again; "
LONG = "".join(f"turn {number} says something else each time; " for number in range(40))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("It is 12:03.", "It is 12:47.", Kind.TIME),
        ("Today is Mon 2026-11-30.", "Today is Tue 2026-12-01.", Kind.TIME),
        ("Now: Nov 30", "Now: Dec 1", Kind.TIME),
        ("at 1796045037 s", "at 1796045999 s", Kind.TIME),
        ("There are 12 files.", "There are 9 files.", Kind.NUMBER),
        ("id 9f3a-bb1 here", "id 7c1d-a01 here", Kind.IDENTIFIER),
        ("Be kind to them.", "Be brief with them.", Kind.REWRITTEN),
        ("", "One more thing is said here. ", Kind.INSERTED),
        ("One thing less is said here. ", "", Kind.REMOVED),
        (FIRST + SECOND, SECOND + FIRST, Kind.MOVED),
        (FIRST * 3, "x" * 3 * FEW_TOKENS, Kind.REWRITTEN),
    ],
)
def test_kind_of_a_change(old: str, new: str, expected: Kind) -> None:
    assert kind(HEAD + old + TAIL, HEAD + new + TAIL) is expected


def test_turns_replaced_by_something_shorter_are_a_compaction() -> None:
    assert kind(HEAD + LONG, HEAD + "A summary. " * 20, is_turn=True) is Kind.COMPACTION
    assert kind(HEAD + LONG, HEAD + "A summary. " * 20) is Kind.REWRITTEN
    assert kind(HEAD + LONG + TAIL, HEAD + "Short: " * 12 + TAIL, is_turn=True) is Kind.COMPACTION


def test_compaction_may_keep_most_but_not_the_end() -> None:
    reminder = "It stays said that all of the rules are to be kept, each of them, always. " * 4
    old, new = f"{HEAD}asked; {reminder}{LONG[:200]}", f"{HEAD}A summary. {reminder}"
    assert kind(old, new, is_turn=True) is Kind.COMPACTION
    assert kind(f"{HEAD}ask. {LONG}", f"{HEAD}told {LONG}", is_turn=True) is Kind.REWRITTEN


def test_thinking_that_a_template_leaves_out_is_named() -> None:
    old = f"{HEAD}<think>hm, hm</think>{TAIL}"
    assert kind(old, HEAD + TAIL, is_turn=True) is Kind.THINKING
    assert kind(old, HEAD + TAIL) is Kind.REMOVED


def test_what_the_client_did_not_write_is_an_option_of_the_template() -> None:
    assert kind(f"{HEAD}low{TAIL}", f"{HEAD}high{TAIL}", is_written=False) is Kind.OPTION


def test_prompts_that_end_with_the_change_do_not_meet_again() -> None:
    seen = difference(letters(HEAD + "abc"), letters(HEAD + "xy"), len(HEAD))
    assert (seen.gone, seen.come, seen.is_moved, seen.kept_share) == (3, 2, False, 0.0)
    assert found_share(letters(HEAD), letters(HEAD), len(HEAD)) == 0.0


def test_prompts_that_differ_for_long_are_given_up() -> None:
    old, new = array("I", range(9_000)), array("I", range(50_000, 59_000))
    seen = difference(old, new, 0)
    assert (seen.gone, seen.come) == (9_000, 9_000)
    whole = difference(old, old, len(old))
    assert (whole.gone, whole.come, whole.is_moved) == (0, 0, False)


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
)
def test_both_prompts_go_on_alike_behind_a_difference(
    head: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> None:
    tail = list(range(10, 10 + 2 * WINDOW))
    old, new = array("I", [*head, *one, *tail]), array("I", [*head, *other, *tail])
    kept = shared_tokens(old, new)
    seen = difference(old, new, kept)
    assert 0 <= seen.gone <= len(old) - kept
    assert 0 <= seen.come <= len(new) - kept
    follows = old[kept + seen.gone :][:WINDOW]
    assert new[kept + seen.come :][: len(follows)] == follows or seen.gone == len(old) - kept
    assert 0.0 <= seen.kept_share <= 1.0


def test_bytes_of_tokens_that_lie_across_others_are_not_found() -> None:
    assert found_share(array("I", [1] * WINDOW), array("I", [256] * 2 * WINDOW), 0) == 0.0


@given(st.lists(st.integers(0, 2), max_size=3_000), st.lists(st.integers(1, 3), max_size=3_000))
def test_few_places_of_a_prompt_are_looked_for(old: Sequence[int], new: Sequence[int]) -> None:
    with mock.patch.object(change, "_find", wraps=change._find) as find:
        difference(array("I", old), array("I", new), 0)
    found_at_regular_places, begins_and_ends = MOST_PLACES // 4, 3
    assert find.call_count <= MOST_PLACES + found_at_regular_places + begins_and_ends


@given(st.lists(st.integers(0, 2**32 - 1), min_size=WINDOW, max_size=200))
def test_whole_prompt_is_found_in_itself(tokens: Sequence[int]) -> None:
    assert found_share(array("I", tokens), array("I", tokens), 0) == 1.0
