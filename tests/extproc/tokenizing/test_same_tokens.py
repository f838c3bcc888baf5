from array import array

from extproc.errors import RequestError
from extproc.tokenizing.encoder_choice import difference, in_parts
from extproc.tokenizing.tokenizer_layout import AddedToken, Cutter, everywhere
from kvstate.overlap import Tokens


def letters(text: str) -> Tokens:
    return array("I", list(text.encode()))


def refusing(text: str) -> Tokens:
    if text == "b":
        raise RequestError("tokenizer_failed")
    return letters(text)


def test_the_same_ids_are_no_difference() -> None:
    assert difference(letters, letters, ["a", "b"], lambda: True) is None


def test_a_difference_names_its_text_by_index() -> None:
    shouting = lambda text: letters(text.upper())  # noqa: E731
    assert difference(shouting, letters, ["1", "b", "c"], lambda: True) == "probe 1 differs"


def test_a_text_that_only_one_refuses_differs() -> None:
    assert difference(refusing, letters, ["a", "b"], lambda: True) == "probe 1 differs"
    assert difference(refusing, refusing, ["a", "b"], lambda: True) is None


def test_what_is_not_compared_in_time_is_not_the_same() -> None:
    answers = iter([True, False])
    found = difference(letters, letters, ["a", "b"], lambda: next(answers))
    assert found == "not compared in time: 1 of 2 probes"


def test_parts_are_put_together_again() -> None:
    seen = []

    def encode(text: str) -> Tokens:
        seen.append(text)
        return letters(text)

    cutter = Cutter([AddedToken(0, "<s>", normalized=False)], everywhere)
    assert in_parts(encode, cutter)("é<s>b<s>") == letters("é<s>b<s>")
    assert seen == ["é", "<s>b", "<s>"]
