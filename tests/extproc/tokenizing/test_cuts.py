from itertools import pairwise

import pytest

from extproc.tokenizing.tokenizer_layout import (
    PART_CHARACTERS,
    AddedToken,
    Cutter,
    everywhere,
    sparse,
)


def added(*contents: str, **flags: bool) -> list[AddedToken]:
    flags = {"normalized": False, **flags}
    return [AddedToken(number, content, **flags) for number, content in enumerate(contents)]


def starts(cutter: Cutter, text: str, after: int = 0) -> list[int]:
    return [start for start, _ in cutter.find(text, after)]


def test_every_token_is_a_place_to_cut_but_the_first() -> None:
    cutter = Cutter(added("<s>", "[x]"), everywhere)
    assert cutter.find("<s>ab[x]<s>c", 0) == [(5, 8), (8, 11)]


def test_cuts_are_a_part_away_from_each_other_but_for_the_last_ones() -> None:
    text = "<s>" * 3_000
    found = starts(Cutter(added("<s>")), text)
    assert found[-1] == len(text) - 3
    assert [one // PART_CHARACTERS for one in found[:-1]] == [1, 2, 3, 4]


def test_parts_grow_with_the_text_before_them() -> None:
    text = "<s>" * 100_000
    found = starts(Cutter(added("<s>")), text)
    assert all(now + sparse(now) <= then for now, then in pairwise(found[:-1]))
    assert len(found) < 40


def test_of_two_kinds_of_tokens_the_nearer_is_taken() -> None:
    cutter = Cutter(added("<s>", "[x]"), lambda _: 5)
    assert starts(cutter, "......[x]<s>......<s>.[x]") == [6, 18, 22]


def test_the_search_goes_on_behind_a_known_cut() -> None:
    assert starts(Cutter(added("<s>"), everywhere), "a<s>b<s>c", after=1) == [5]
    assert starts(Cutter(added("<s>")), "a<s>b<s>c<s>", after=1) == [9]


def test_one_cut_is_before_the_last_message() -> None:
    cutter = Cutter(added("<s>", "[x]"))
    text = "<s>user[x]" + "a question of some length" + "[x]<s>answer[x]"
    assert starts(cutter, text) == [text.index("[x]a"), text.rindex("[x]")]
    assert starts(cutter, "a question of some length<s>[x]") == [28]


def test_a_text_without_tokens_is_not_cut() -> None:
    assert Cutter(added("<s>")).find("plain" * 1_000, 0) == []
    assert Cutter([]).find("<s>", 0) == []


def test_places_are_counted_in_characters() -> None:
    assert starts(Cutter(added("<\uff5cUser\uff5c>")), "\u4e2d<\uff5cUser\uff5c>") == [1]


@pytest.mark.parametrize(
    "flag", ["normalized", "lstrip", "single_word"], ids=["normalized", "lstrip", "single word"]
)
def test_tokens_that_ask_for_what_is_around_them_are_no_place_to_cut(flag: str) -> None:
    assert not Cutter(added("<s>", **{flag: True})).contents


def test_a_token_that_takes_space_to_its_right_is_a_place_to_cut() -> None:
    assert Cutter(added("<s>", rstrip=True)).contents == {"<s>"}


@pytest.mark.parametrize("content", ["word>", " <s>", "\n", "_x", "1.", "<" + "x" * 64, ""])
def test_tokens_that_begin_like_a_word_or_a_space_or_are_long_are_none(content: str) -> None:
    assert not Cutter(added(content)).contents


def test_tokens_that_share_characters_are_no_place_to_cut() -> None:
    tokens = added("<a>", "<a><b>", "b><c>", "<x>", "--", "[in]", "<[in]>", "<y", "<y>")
    assert Cutter(tokens).contents == {"<x>"}


def test_a_token_shares_characters_with_itself() -> None:
    assert not Cutter(added("<s><s>", "//")).contents


def test_few_first_characters_are_searched_for() -> None:
    contents = Cutter(added("<a>", "<b>", "[a]", "{a}", "(a)", "|a|", "*a*")).contents
    assert {"<a>", "<b>"} < contents
    assert len({content[:1] for content in contents}) == 4
