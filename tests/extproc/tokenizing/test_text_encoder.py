from array import array
from collections.abc import Sequence

import pytest

from extproc.base.errors import RequestError
from extproc.tokenizing.text_encoder import MAX_ENDINGS, TextEncoder
from extproc.tokenizing.tokenizer_layout import AddedToken, Cutter
from kvstate.overlap import Tokens

CUTTER = Cutter([AddedToken(0, "<s>", normalized=False)])


class Letters:
    """Makes one id per character; remembers the texts that it was last given."""

    name = "letters"
    inline_characters = 1_000
    max_characters = 10_000
    forgotten_characters = 0

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        self.asked = list(texts)
        return [array("I", map(ord, text)) for text in texts]


def encode(texts: TextEncoder, text: str) -> Tokens:
    return texts.finish(texts.begin(text)).ids


def test_next_turn_costs_its_new_text_only() -> None:
    letters = Letters()
    texts = TextEncoder(letters, CUTTER, 1 << 20)
    first = f"<s>{'é' * 4_000}<s>answer: "
    encode(texts, first)
    work = texts.begin(first + "yes<s>and?")
    assert work.new_characters == len("<s>answer: yes<s>and?")
    assert texts.finish(work).ids.tolist() == [*map(ord, first + "yes<s>and?")]
    assert letters.asked == ["<s>answer: yes", "<s>and?"]


def test_different_question_behind_a_known_beginning_costs_itself_only() -> None:
    letters = Letters()
    texts = TextEncoder(letters, CUTTER, 1 << 20)
    before = "<s>" + "what is the same for all, of some length; " * 10
    encode(texts, f"{before}<s>one question of some length<s>answer: ")
    text = f"{before}<s>another question of some length<s>answer: "
    assert encode(texts, text).tolist() == [*map(ord, text)]
    assert letters.asked == ["<s>another question of some length"]


def test_forgotten_characters_are_tokenized_again() -> None:
    letters = Letters()
    letters.forgotten_characters = 20
    texts = TextEncoder(letters, CUTTER, 1 << 20)
    first = "<s>" + "a" * 500 + "<s>answer: "
    encode(texts, first)
    encode(texts, f"{first}yes")
    assert texts.begin(f"{first}yes").new_characters == len("<s>answer: yes")
    encode(texts, f"{first}yes, of course")
    assert texts.begin(f"{first}yes, of course").new_characters == 0


def test_endings_of_texts_are_known_and_bounded() -> None:
    letters = Letters()
    texts = TextEncoder(letters, CUTTER, 1 << 20)
    for number in range(2 * MAX_ENDINGS + 4):
        text = f"{number}<s>{number // 2}"
        assert encode(texts, text).tolist() == [*map(ord, text)]
        assert len(letters.asked) == 2 - number % 2
    assert encode(texts, f"<s>{number // 2}").tolist() == [*map(ord, f"<s>{number // 2}")]


def test_repeated_text_costs_nothing() -> None:
    letters = Letters()
    texts = TextEncoder(letters, CUTTER, 1 << 20)
    ids = encode(texts, "a" * 500)
    letters.asked.clear()
    assert texts.begin("a" * 500).new_characters == 0
    assert encode(texts, "a" * 500) is ids
    assert not letters.asked


def test_uncut_text_is_known_only_whole() -> None:
    texts = TextEncoder(Letters(), None, 1 << 20)
    encode(texts, "<s>" * 200)
    assert texts.begin("<s>" * 200).new_characters == 0
    assert texts.begin("<s>" * 201).new_characters == 603


def test_lasting_ids_are_those_before_the_last_cut() -> None:
    texts = TextEncoder(Letters(), CUTTER, 1 << 20)
    assert texts.finish(texts.begin("one<s>two<s>three")).lasting == 9
    assert texts.finish(texts.begin("one")).lasting == 0


def test_empty_text_has_no_ids() -> None:
    assert encode(TextEncoder(Letters(), CUTTER, 1 << 20), "") == array("I")


def test_text_with_too_many_new_characters_is_refused() -> None:
    texts = TextEncoder(Letters(), CUTTER, 1 << 20)
    encode(texts, "<s>" + "a" * 9_000 + "<s>")
    assert len(encode(texts, "<s>" + "a" * 9_000 + "<s>" + "b" * 9_000)) == 18_006
    with pytest.raises(RequestError, match="too_many_new_characters"):
        encode(texts, "c" * 10_001)


def test_is_cheap_depends_on_the_library() -> None:
    texts = TextEncoder(Letters(), CUTTER, 1 << 20)
    assert texts.is_cheap(1_000)
    assert not texts.is_cheap(1_001)
