from array import array

from extproc.base.errors import RequestError
from extproc.tokenizing.encoder_choice import difference, in_parts
from extproc.tokenizing.tokenizer_layout import AddedToken, Cutter, cut_everywhere
from kvstate.overlap import Tokens


def letters(text: str) -> Tokens:
    return array("I", list(text.encode()))


def refusing(text: str) -> Tokens:
    if text == "b":
        raise RequestError("tokenizer_failed")
    return letters(text)


def test_difference_is_none_for_equal_ids() -> None:
    assert difference(letters, letters, ["a", "b"], lambda: True) is None


def test_difference_names_its_text_by_index() -> None:
    def shouting(text: str) -> Tokens:
        return letters(text.upper())

    assert difference(shouting, letters, ["1", "b", "c"], lambda: True) == "probe 1 differs"


def test_difference_includes_a_text_that_only_one_encoder_refuses() -> None:
    assert difference(refusing, letters, ["a", "b"], lambda: True) == "probe 1 differs"
    assert difference(refusing, refusing, ["a", "b"], lambda: True) is None


def test_difference_includes_texts_not_compared_in_time() -> None:
    answers = iter([True, False])
    found = difference(letters, letters, ["a", "b"], lambda: next(answers))
    assert found == "not compared in time: 1 of 2 probes"


def test_in_parts_joins_the_ids_of_parts() -> None:
    seen = []

    def encode(text: str) -> Tokens:
        seen.append(text)
        return letters(text)

    cutter = Cutter([AddedToken(0, "<s>", normalized=False)], cut_everywhere)
    assert in_parts(encode, cutter)("é<s>b<s>") == letters("é<s>b<s>")
    assert seen == ["é", "<s>b", "<s>"]
