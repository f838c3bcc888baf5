from itertools import pairwise

import pytest

from extproc.tokenizing.tokenizer_layout import (
    PART_CHARACTERS,
    AddedToken,
    Cutter,
    cut_everywhere,
    sparse,
)


def added(*contents: str, **flags: bool) -> list[AddedToken]:
    flags = {"normalized": False, **flags}
    return [AddedToken(number, content, **flags) for number, content in enumerate(contents)]


def starts(cutter: Cutter, text: str, after: int = 0) -> list[int]:
    return [start for start, _ in cutter.find(text, after)]


def test_find_cuts_at_every_token_but_the_first() -> None:
    cutter = Cutter(added("<s>", "[x]"), cut_everywhere)
    assert cutter.find("<s>ab[x]<s>c", 0) == [(5, 8), (8, 11)]


def test_find_cuts_nowhere_if_overlaps_would_take_too_long_to_find() -> None:
    tokens = [f"<{number:0998}>" for number in range(3)]
    text = "".join(tokens)
    assert Cutter(added("<s>", *tokens[:1]), cut_everywhere).contents
    assert Cutter(added("<s>", *tokens), cut_everywhere).find(text + "<s>", 0) == []


def test_cuts_are_a_part_apart_but_for_the_last() -> None:
    text = "<s>" * 3_000
    found = starts(Cutter(added("<s>")), text)
    assert found[-1] == len(text) - 3
    assert [one // PART_CHARACTERS for one in found[:-1]] == [1, 2, 3, 4]


def test_parts_grow_with_the_text_before_them() -> None:
    text = "<s>" * 100_000
    found = starts(Cutter(added("<s>")), text)
    assert all(now + sparse(now) <= then for now, then in pairwise(found[:-1]))
    assert len(found) < 40


def test_find_takes_the_nearer_of_two_kinds_of_tokens() -> None:
    cutter = Cutter(added("<s>", "[x]"), lambda _: 5)
    assert starts(cutter, "......[x]<s>......<s>.[x]") == [6, 18, 22]


def test_find_continues_behind_a_known_cut() -> None:
    assert starts(Cutter(added("<s>"), cut_everywhere), "a<s>b<s>c", after=1) == [5]
    assert starts(Cutter(added("<s>")), "a<s>b<s>c<s>", after=1) == [9]


def test_find_cuts_before_the_last_message() -> None:
    cutter = Cutter(added("<s>", "[x]"))
    text = "<s>user[x]" + "a question of some length" + "[x]<s>answer[x]"
    assert starts(cutter, text) == [text.index("[x]a"), text.rindex("[x]")]
    assert starts(cutter, "a question of some length<s>[x]") == [28]


def test_find_cuts_no_text_without_tokens() -> None:
    assert Cutter(added("<s>")).find("plain" * 1_000, 0) == []
    assert Cutter([]).find("<s>", 0) == []


def test_cut_positions_are_counted_in_characters() -> None:
    assert starts(Cutter(added("<\uff5cUser\uff5c>")), "\u4e2d<\uff5cUser\uff5c>") == [1]


@pytest.mark.parametrize(
    "flag", ["normalized", "lstrip", "single_word"], ids=["normalized", "lstrip", "single word"]
)
def test_cutter_ignores_tokens_that_depend_on_their_surroundings(flag: str) -> None:
    assert not Cutter(added("<s>", **{flag: True})).contents


def test_cutter_accepts_a_token_that_absorbs_space_to_its_right() -> None:
    assert Cutter(added("<s>", rstrip=True)).contents == {"<s>"}


@pytest.mark.parametrize("content", ["word>", " <s>", "\n", "_x", "1.", "<" + "x" * 64, ""])
def test_cutter_ignores_long_tokens_and_those_that_begin_like_words_or_spaces(content: str) -> None:
    assert not Cutter(added(content)).contents


def test_cutter_ignores_tokens_that_share_characters() -> None:
    tokens = added("<a>", "<a><b>", "b><c>", "<x>", "--", "[in]", "<[in]>", "<y", "<y>")
    assert Cutter(tokens).contents == {"<x>"}


def test_cutter_ignores_a_token_that_overlaps_itself() -> None:
    assert not Cutter(added("<s><s>", "//")).contents


def test_cutter_searches_few_first_characters() -> None:
    contents = Cutter(added("<a>", "<b>", "[a]", "{a}", "(a)", "|a|", "*a*")).contents
    assert {"<a>", "<b>"} < contents
    assert len({content[:1] for content in contents}) == 4
