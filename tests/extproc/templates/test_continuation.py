from typing import Any

import pytest

from extproc.errors import RequestError
from extproc.templates.chat_template import tagged, up_to_final, up_to_tag

TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_the_tag_stands_behind_the_last_text() -> None:
    final, message = tagged({"role": "assistant", "content": "so"})
    assert (final, message["content"]) == ("so", "so" + TAG)
    final, message = tagged({"role": "assistant", "content": [text("a"), text("so")]})
    assert (final, message["content"]) == ("so", [text("a"), text("so" + TAG)])


def test_without_a_text_there_is_nothing_to_continue() -> None:
    with pytest.raises(RequestError, match="template_failed"):
        tagged({"role": "assistant", "content": []})


@pytest.mark.parametrize(
    ("rendered", "end"),
    [
        (f"<so {TAG}>", "<so "),
        (f"<so {TAG.strip()}>", "<so"),
        (f"so {TAG}so {TAG}x", f"so {TAG}so "),
    ],
)
def test_spaces_before_the_tag_are_kept_where_the_template_keeps_them(
    rendered: str, end: str
) -> None:
    assert up_to_tag(rendered, "so ") == end


@pytest.mark.parametrize("rendered", ["<so>", f"<{TAG}>"])
def test_a_message_that_is_left_out_is_an_error(rendered: str) -> None:
    with pytest.raises(RequestError, match="template_failed"):
        up_to_tag(rendered, "so")


@pytest.mark.parametrize(
    ("rendered", "final", "end"),
    [("<so >", "so ", "<so "), ("<so>", "so ", "<so"), ("<so so>", "so", "<so so")],
)
def test_a_message_ends_where_its_text_last_does(rendered: str, final: str, end: str) -> None:
    assert up_to_final(rendered, final) == end


def test_a_message_that_is_nowhere_has_no_end() -> None:
    with pytest.raises(RequestError, match="unsupported_continuation"):
        up_to_final("gone", "so")
