"""Which added tokens golden requests hold."""

from extproc.proof.golden_added import MOST_CHARACTERS, MOST_TOKENS, text_with


def test_all_of_a_few_tokens_are_there_in_order() -> None:
    assert text_with(["<a>", "<b>"]) == "say <a> and<a>\nsay <b> and<b>\n"


def test_no_tokens_make_no_text() -> None:
    assert text_with([]) == ""


def test_tokens_that_differ_in_a_number_leave_room_for_others() -> None:
    numbered = [f"<unused{number}>" for number in range(5_000)]
    text = text_with([*numbered, "<think>"])
    assert "<think>" in text
    assert text.count("\n") == MOST_TOKENS


def test_tokens_that_are_too_long_are_left_out() -> None:
    text = text_with(["x" * (MOST_CHARACTERS - 3), "y" * 4, "<z>"])
    assert "y" not in text.replace("say", "")
    assert "<z>" in text
