"""Continuing the final message of a conversation: where its text ends in what was rendered.

Source: transformers' continue_final_message: 4.57.1 and 5.23.0 append a tag and cut there, 4.55.4
looks for the message's text. They agree unless a template changes or repeats it.
"""

from typing import Any

from extproc.errors import RequestError

# transformers' own.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def tagged(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text to be continued, and its message with the tag behind it.

    Raises:
        RequestError: there is none, as engines find too.
    """
    content = message["content"]
    if isinstance(content, str):
        return content, {**message, "content": content + _TAG}
    if not content:
        raise RequestError("template_failed")
    *before, last = content
    tagged = {**last, "text": last["text"] + _TAG}
    return last["text"], {**message, "content": [*before, tagged]}


def up_to_tag(text: str, final: str) -> str:
    """As newer releases cut: at the tag, with the spaces before it if the template kept them.

    Raises:
        RequestError: the template leaves the message out, as engines find too.
    """
    tag = _TAG.strip()
    if final.strip() not in text or tag not in text:
        raise RequestError("template_failed")
    place = text.rindex(tag)
    is_kept = text.startswith(_TAG, place)
    return text[:place] if is_kept else text[:place].rstrip()


def up_to_final(text: str, final: str) -> str:
    """As 4.55 cuts: behind the last occurrence of what is continued.

    Raises:
        RequestError: there is none.
    """
    stripped = final.strip()
    if stripped not in text:
        raise RequestError("unsupported_continuation")
    place = text.rindex(stripped)
    end = place + len(final.lstrip())
    return text[:end] if text[place:end] == final else text[: place + len(stripped)]
