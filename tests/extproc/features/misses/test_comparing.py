from array import array

import pytest

from extproc.features.misses.change import Kind
from extproc.features.misses.comparing import Alike, Match, match_of
from extproc.features.misses.verdicts import Change
from extproc.requests.parts import Part, Place
from extproc.routing.claims.ends import ASKING_TOKENS
from kvstate.overlap import Tokens


def letters(text: str) -> Tokens:
    """One token for each letter."""
    return array("I", [ord(letter) for letter in text])


def text_of(tokens: Tokens) -> str:
    return "".join(map(chr, tokens))


SYSTEM = "You help. It is 12:03 now. There are many rules, which are always the same. "
TURNS = ["Please look at what fails. ", "I have looked at it, and it fails. ", "Then mend it now! "]
ASKS = "<asks>"


def prompt(system: str, *turns: str) -> Tokens:
    return letters(system + "".join(turns) + ASKS)


def parts(system: str, *turns: str) -> list[Part]:
    made = [Part(Place.TURN, at, (text,), "user") for at, text in enumerate(turns)]
    return [Part(Place.SYSTEM, 0, (system,), "system"), *made]


OLD = prompt(SYSTEM, *TURNS[:1])
NEW = prompt(SYSTEM, *TURNS)


def test_prompt_that_goes_on_keeps_all_but_how_the_last_one_asked_for_its_answer() -> None:
    match = match_of(NEW, [Alike(7, OLD)], parts(SYSTEM, *TURNS), text_of)
    kept = len(OLD) - len(ASKS)
    assert match == Match(7, kept, kept)
    assert len(ASKS) <= ASKING_TOKENS


def test_change_in_the_system_is_placed_and_named() -> None:
    later = SYSTEM.replace("12:03", "12:47")
    match = match_of(prompt(later, *TURNS), [Alike(7, OLD)], parts(later, *TURNS), text_of)
    at = SYSTEM.index("03")
    assert match == Match(7, len(OLD), at, Change(at, "system", 0, "system", Kind.TIME))
    blind = match_of(prompt(later, *TURNS), [Alike(7, OLD)], parts(later, *TURNS), None)
    assert blind == Match(7, len(OLD), at, Change(at))


def test_conversation_of_which_most_is_found_is_the_one() -> None:
    other = prompt(SYSTEM, "Write me a poem about the sea, with many waves. ")
    alike = [Alike(1, other, is_named=True), Alike(2, OLD), Alike(3, other)]
    found = match_of(NEW, alike, parts(SYSTEM, *TURNS), text_of)
    assert found is not None
    assert found.number == 2


def test_prompt_that_shares_no_turn_begins_a_conversation() -> None:
    other = prompt(SYSTEM, "Write me a poem about the sea, with many waves. ")
    assert match_of(NEW, [Alike(1, other)], parts(SYSTEM, *TURNS), text_of) is None
    assert match_of(NEW, [Alike(1, other, is_named=True)], parts(SYSTEM, *TURNS), text_of) is None
    assert match_of(NEW, [], parts(SYSTEM, *TURNS), text_of) is None


def test_prompt_that_goes_on_from_an_earlier_one_begins_a_conversation_of_its_own() -> None:
    gone_on = prompt(SYSTEM, TURNS[0], "This went on with something else, for long. " * 3)
    alike = [Alike(4, gone_on, begun=len(OLD) - len(ASKS))]
    match = match_of(NEW, alike, parts(SYSTEM, *TURNS), text_of)
    assert match == Match(0, len(OLD) - len(ASKS), len(OLD) - len(ASKS))


@pytest.mark.parametrize("is_named", [True, False])
def test_turns_that_were_all_replaced_are_known_by_the_session_alone(is_named: bool) -> None:
    long = prompt(SYSTEM, *(f"Turn {n} says what no other turn says. " for n in range(30)))
    summary = "All that was said before, in a few words. "
    new, said = prompt(SYSTEM, summary, TURNS[2]), parts(SYSTEM, summary, TURNS[2])
    match = match_of(new, [Alike(9, long, is_named=is_named, turns=30)], said, text_of)
    change = Change(len(SYSTEM), "turn", 0, "user", Kind.COMPACTION)
    assert match == (Match(9, len(long), len(SYSTEM), change) if is_named else None)


def test_prompt_of_another_session_may_have_forked_but_does_not_continue() -> None:
    alike = [Alike(7, NEW, begun=len(OLD), is_apart=True)]
    other = prompt(SYSTEM, TURNS[0], "Write a poem. ", *TURNS[1:])
    found = match_of(other, alike, parts(SYSTEM, *TURNS), text_of)
    assert found == Match(0, len(OLD), len(OLD))
    apart = [Alike(7, NEW, is_named=True, turns=2, is_apart=True)]
    assert match_of(other, apart, parts(SYSTEM, *TURNS), text_of) is None


@pytest.mark.parametrize(("has_now", "kind"), [(True, Kind.INSERTED), (False, Kind.REMOVED)])
def test_request_with_tools_where_there_were_none_or_without_differs_in_these(
    has_now: bool, kind: Kind
) -> None:
    tools = [Part(Place.TOOLS, 0, ("Read", "{}"))] if has_now else []
    said = [*tools, *parts(SYSTEM + "Tools. ", *TURNS)]
    new = prompt(SYSTEM + "Tools. ", *TURNS)
    found = match_of(new, [Alike(7, OLD, agrees_on_tools=False)], said, text_of)
    assert found == Match(7, len(OLD), len(SYSTEM), Change(len(SYSTEM), Place.TOOLS, kind=kind))
    replaced = prompt(SYSTEM, "A summary of all. ")
    named = Alike(7, OLD, is_named=True, turns=2, agrees_on_tools=False)
    assert match_of(replaced, [named], said, text_of) is None


def test_another_system_in_the_same_session_begins_a_conversation() -> None:
    long = prompt("Write titles. " + SYSTEM, *(f"Turn {n} of another kind. " for n in range(30)))
    alike = [Alike(9, long, is_named=True, turns=30)]
    assert match_of(NEW, alike, parts(SYSTEM, *TURNS), text_of) is None


def test_what_no_part_says_was_written_by_the_template() -> None:
    old, new = letters(f"effort low;{SYSTEM}{TURNS[0]}"), letters(f"effort high;{SYSTEM}{TURNS[0]}")
    match = match_of(new, [Alike(1, old)], parts(SYSTEM, TURNS[0]), text_of)
    at = len("effort ")
    assert match is not None
    assert match.change == Change(at, "template", kind=Kind.OPTION)
