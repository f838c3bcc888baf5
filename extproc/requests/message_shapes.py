"""The two forms in which engines give message contents to templates: as text, and in parts.

Source: vLLM 0.24.0 and 0.32.0, its content formats "string" and "openai".
"""

from collections.abc import Sequence
from typing import Any

from extproc.errors import RequestError

# Stands where no text of a template or client stands, to be found again in what was rendered.
MEDIA_MARK = "\ue000kvsteer media\ue001"

Messages = Sequence[dict[str, Any]]


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without media with its content as text, parts joined by line ends."""
    content = message.get("content")
    if isinstance(content, str):
        return message
    texts = [part["text"] for part in content or () if part["text"]]
    return {**message, "content": "\n".join(texts)}


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its content in parts; that of a tool stays text without media.

    Raises:
        RequestError: a part says more than its text, which newer releases show to templates.
    """
    content = message.get("content")
    if message.get("role") == "tool" and not has_media(message):
        # unlike `flat`, the empty ones count
        is_text = isinstance(content, str)
        text = content if is_text else "\n".join(part["text"] for part in content or ())
        return {**message, "content": text}
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    if any(len(part) > len(("type", "text")) for part in content or ()):
        raise RequestError("unsupported_content")
    return {**message, "content": content or []}


def has_media(message: dict[str, Any]) -> bool:
    """Returns whether a part of a message is media."""
    content = message.get("content")
    return type(content) is list and any(part["type"] != "text" for part in content)


def marked(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with a mark, as text, in the place of every media part."""
    if not has_media(message):
        return message
    mark = {"type": "text", "text": MEDIA_MARK}
    content = [part if part["type"] == "text" else mark for part in message["content"]]
    return {**message, "content": content}


def texts_before_media(messages: Messages) -> list[str]:
    """Returns the texts that stand before the first media of the messages."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
            continue
        for part in content or ():
            if part["type"] != "text":
                return texts
            texts.append(part["text"])
    return texts
