"""Messages of a conversation with what an engine leaves of them for the chat template.

Source: vLLM's parsing of chat messages, 0.10.2, 0.14.1, 0.19.1, 0.24.0 and 0.32.0. Where these
releases differ, the message is not keyed.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from extproc.errors import RequestError
from extproc.requests.costly_json import refuse_costly
from extproc.requests.known_bodies import Shaped
from extproc.requests.prompt import MAX_MESSAGES

# Parts that are text under another name; the text lies under the key given here. Names that came
# later ("output_text") are refused by the engines before, which is no other prompt.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

_MEDIA_PARTS = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}

# A line that some clients change with every request; engines before 0.32 leave it in place.
_BILLING_LINE = "x-anthropic-billing-header"

NONE: Shaped = ([], False)

_PLAIN_KEYS = ("role", "content")
_PLAIN_ROLES = ("user", "assistant")  # no set: a role may be anything, hashable or not


def messages_of(
    messages: list[dict[str, Any]], *, orders_calls: bool = True, before: Shaped = NONE
) -> Shaped:
    """The messages as templates see them, and whether there is media among their parts.

    orders_calls: whether the engine brings the keys of tool calls into its own order, in which
        templates may print them.
    before: the conversation's first messages, if they are known in this form.

    Raises:
        RequestError: there is none, there are too many, or one is not understood.
    """
    first, has_media = before
    if not first and not messages:
        raise RequestError("empty_prompt")
    if len(first) + len(messages) > MAX_MESSAGES:
        raise RequestError("too_many_messages")
    if all(map(_is_plain, messages)):
        return [*first, *messages], has_media
    refuse_costly(b"\n".join(_arguments(messages)))
    parsed = [_message(message, orders_calls) for message in messages]
    has_media = has_media or any(_has_media(message["content"]) for message in parsed)
    return [*first, *parsed], has_media


def _arguments(messages: list[dict[str, Any]]) -> Iterator[bytes]:
    """The arguments of calls that are JSON within JSON, to be decoded once more."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            match call:
                case {"function": {"arguments": str(arguments)}}:
                    yield arguments.encode("utf-8", "surrogatepass")


def _is_plain(message: dict[str, Any]) -> bool:
    """Whether a message is what is left of it already, as in most conversations all are."""
    return (
        tuple(message) == _PLAIN_KEYS
        and type(message["content"]) is str
        and message["role"] in _PLAIN_ROLES
    )


def _message(message: dict[str, Any], orders_calls: bool) -> dict[str, Any]:  # noqa: FBT001
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("bad_request")
    kept: dict[str, Any] = {"role": role, "content": _content(message.get("content"))}
    if role == "system":
        _refuse_billing_line(kept["content"])
    if role == "developer":
        if message.get("tools") is not None:
            raise RequestError("unsupported_tools")
        kept["tools"] = None
    if isinstance(message.get("task"), str):
        raise RequestError("unsupported_task")
    if isinstance(message.get("name"), str):
        kept["name"] = message["name"]
    if role == "tool" and "tool_call_id" in message:
        kept["tool_call_id"] = message["tool_call_id"]
    if role == "assistant":
        kept |= _of_turn(message, orders_calls)
    return kept


def _of_turn(message: dict[str, Any], orders_calls: bool) -> dict[str, Any]:  # noqa: FBT001
    """What only a model's own turn has: what it thought and what it called."""
    keys = ("reasoning", "reasoning_content")
    turn = {key: message[key] for key in keys if message.get(key) is not None}
    calls = message.get("tool_calls")
    if not calls:
        return turn
    if not isinstance(calls, list):
        raise RequestError("bad_request")
    parsed = map(_call, calls)
    return {**turn, "tool_calls": [_ordered(call) if orders_calls else call for call in parsed]}


def _content(content: object) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        return [_part(part) for part in content]
    raise RequestError("bad_request")


def _part(part: object) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise RequestError("unsupported_content")  # a bare text is one to old releases only
    kind = part.get("type")
    if not isinstance(kind, str):
        raise RequestError("unsupported_content")
    if kind in _MEDIA_PARTS:
        return {"type": _MEDIA_PARTS[kind]}
    key = _TEXT_PARTS.get(kind)
    text = part.get(key) if key else None
    if key is None or not isinstance(text, str) or not _MEDIA_PARTS.keys().isdisjoint(part):
        raise RequestError("unsupported_content")
    others = {name: value for name, value in part.items() if name not in ("type", key)}
    return {"type": "text", "text": text, **others}


def _refuse_billing_line(content: str | list[dict[str, Any]] | None) -> None:
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    if any(part.get("text", "").startswith(_BILLING_LINE) for part in parts):
        raise RequestError("unsupported_billing_line")


def _has_media(content: str | list[dict[str, Any]] | None) -> bool:
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def _call(call: object) -> dict[str, Any]:
    """A tool call with its arguments as an object.

    Clients send arguments as JSON text. What is no JSON object was an error to old releases, is
    passed on by some and an empty object to the newest.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError("bad_request")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            raise RequestError("unsupported_tool_arguments") from None
    if not isinstance(arguments, dict):
        raise RequestError("unsupported_tool_arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _ordered(call: dict[str, Any]) -> dict[str, Any]:
    """In the order in which the engine's validation leaves the keys: its own first."""
    function = _first(call["function"], ("arguments", "name"))
    return _first({**call, "function": function}, ("id", "function", "type"))


def _first(values: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {**{key: values[key] for key in keys if key in values}, **values}
