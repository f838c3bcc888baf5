from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.templates.chat_template import tagged, up_to_final, up_to_tag

TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_tagged_appends_the_tag_to_the_last_text() -> None:
    final, message = tagged({"role": "assistant", "content": "so"})
    assert (final, message["content"]) == ("so", "so" + TAG)
    final, message = tagged({"role": "assistant", "content": [text("a"), text("so")]})
    assert (final, message["content"]) == ("so", [text("a"), text("so" + TAG)])


def test_tagged_refuses_a_message_without_text() -> None:
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
def test_up_to_tag_keeps_spaces_as_the_template_does(rendered: str, end: str) -> None:
    assert up_to_tag(rendered, "so ") == end


@pytest.mark.parametrize("rendered", ["<so>", f"<{TAG}>"])
def test_up_to_tag_refuses_a_message_that_is_left_out(rendered: str) -> None:
    with pytest.raises(RequestError, match="template_failed"):
        up_to_tag(rendered, "so")


@pytest.mark.parametrize(
    ("rendered", "final", "end"),
    [("<so >", "so ", "<so "), ("<so>", "so ", "<so"), ("<so so>", "so", "<so so")],
)
def test_up_to_final_ends_at_the_last_occurrence(rendered: str, final: str, end: str) -> None:
    assert up_to_final(rendered, final) == end


def test_up_to_final_refuses_a_message_that_does_not_occur() -> None:
    with pytest.raises(RequestError, match="unsupported_continuation"):
        up_to_final("gone", "so")
