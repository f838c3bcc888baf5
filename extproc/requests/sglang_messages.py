"""Anthropic's messages as SGLang turns them into a chat completion.

Its request models drop every field that they do not name, `cache_salt` as well.

Source: SGLang 0.5.16 to 0.5.23, srt/entrypoints/anthropic/protocol.py and serving.py.
"""

import json
from typing import Any

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.dialect import Dialect
from extproc.requests.lax_values import flag, text
from extproc.requests.prompt import InferenceRequest
from extproc.requests.sglang_chat import (
    Messages,
    TemplateSettings,
    conversation,
    effort_in,
    printed_tools,
)
from extproc.requests.sglang_fields import as_read
from extproc.requests.sglang_media import TOOL_REFERENCE
from extproc.requests.sglang_rules import SglangRules

# Anthropic's names for tool_choice, and those of chat completions.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

# Kinds of tools that the engine leaves out: their provider runs them.
_SERVER_TOOLS = ("web_search_", "computer_", "bash_", "text_editor_")

# Kinds of blocks; the engine refuses all others.
_KINDS = frozenset(
    (
        *("text", "image", "tool_use", "tool_result", "tool_reference", "search_result"),
        *("thinking", "redacted_thinking"),
    )
)


class _SglangMessage(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _SglangMessagesBody(msgspec.Struct):
    messages: list[_SglangMessage]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


_body = msgspec.json.Decoder(_SglangMessagesBody)


def parse(content: bytes, rules: SglangRules, dialect: Dialect) -> InferenceRequest:
    """Parses the body of a messages request for SGLang.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no such request.
    """
    body = _body.decode(content)
    if not rules.converts:
        _refuse_what_differs(body)
    inline = [one for one in body.messages if one.role == "system"]
    turns = [turn for one in body.messages for turn in _turns(one, rules)]
    system = _system(body.system)
    merged = None
    if inline:
        others = [one for one in body.messages if one.role != "system"]
        more = [text for one in inline if (text := _trimmed(one.content))]
        merged = [
            *_as_turn([*system, *more]),
            *(turn for one in others for turn in _turns(one, rules)),
        ]
    settings = TemplateSettings(
        tools=_tools(body, rules),
        effort=_effort(body),
        sets_switches=False,
        merged=merged,
        thinking=_thinking(body, rules),
    )
    chat = conversation([*_as_turn(system), *turns], settings, rules, dialect)
    return InferenceRequest(body.model, [chat])  # this API has no salt


def _refuse_what_differs(body: _SglangMessagesBody) -> None:
    """Refuses what releases before 0.5.16 read in other ways than the newer ones."""
    is_text = isinstance(body.system, str | None)
    is_text = is_text and all(isinstance(one.content, str) for one in body.messages)
    is_inline = any(one.role == "system" for one in body.messages)
    if not is_text or is_inline or body.tools or body.thinking or body.output_config:
        raise RequestError("unsupported_by_engine")


def _as_turn(system: list[str]) -> Messages:
    return [{"role": "system", "content": "\n".join(system)}] if system else []


def _system(system: str | list[dict[str, Any]] | None) -> list[str]:
    if not system:
        return []
    if isinstance(system, str):
        return [system] if system.strip() else []
    return [text for block in system if (text := _text(block))]


def _text(block: dict[str, Any]) -> str:
    """Returns the text of a block, "" for one of another kind."""
    if _kind(block) != "text":
        return ""
    if not isinstance(block.get("text"), str):
        raise RequestError("bad_request")
    return str(block["text"])


def _kind(block: dict[str, Any]) -> str:
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise RequestError("bad_request")
    return kind


def _trimmed(content: str | list[dict[str, Any]]) -> str:
    texts = [content] if isinstance(content, str) else map(_text, content)
    return "\n".join(filter(None, (text.strip() for text in texts)))


def _turns(message: _SglangMessage, rules: SglangRules) -> Messages:
    """Returns the turns that a message becomes: results of tools are turns of their own."""
    if message.role not in ("user", "assistant", "system"):
        raise RequestError("bad_request")
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts = _thoughts(message, rules)
    turns: Messages = []
    calls: Messages = []
    for block in message.content:
        kind = _kind(block)
        if kind == "tool_use":
            calls.append(_call(block, is_read=message.role == "assistant"))
        elif kind == "tool_result" and message.role == "user":
            turns += _user_turn(parts)
            turns += _results(block, rules)
            parts = []
        elif (part := _part(block)) is not None:
            parts.append(part)
    return [*turns, *_last_turn(message.role, parts, calls)]


def _user_turn(parts: Messages) -> Messages:
    return [{"role": "user", "content": _joined(parts)}] if parts else []


def _last_turn(role: str, parts: Messages, calls: Messages) -> Messages:
    """Returns the turn of a message after all results of tools; a user's may be none."""
    turn: dict[str, Any] = {"role": role}
    if calls:
        turn["tool_calls"] = calls
    if parts:
        turn["content"] = _joined(parts)
    elif not calls:
        if role == "user":
            return []
        turn["content"] = ""
    return [turn]


def _thoughts(message: _SglangMessage, rules: SglangRules) -> Messages:
    """Returns what the model thought as it stands before its text: a list of one part, or none."""
    if message.role != "assistant":
        return []
    found = []
    for block in message.content:
        assert isinstance(block, dict)
        match block:
            case {"type": "redacted_thinking"}:
                raise RequestError("bad_request")  # the engine refuses it
            case {"type": "thinking", "thinking": str(thought)} if thought:
                found.append(thought)
    wrapping = rules.wrapping
    if not found or wrapping is None:
        return []
    text = "\n".join(found)
    return [{"type": "text", "text": f"{wrapping.before}{text}\n{wrapping.after}"}]


def _part(block: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the part of a turn that a block becomes; None for one that the engine leaves out."""
    kind = _kind(block)
    if kind == "text":
        return {"type": "text", "text": _text(block)}
    if kind == "image":
        return _image(block)
    text = _found(block) if kind == "search_result" else ""
    if kind == "tool_result":  # not a user's
        text = f"Tool result: {_result_text(block)}"
    return {"type": "text", "text": text} if text else None


def _image(block: dict[str, Any]) -> dict[str, Any] | None:
    """Returns an image, None if it has no source that the engine reads."""
    match block.get("source"):
        case {"type": "base64", **source}:
            is_read = bool(source.get("data"))
        case {**source}:
            is_read = bool(source.get("url"))
        case _:
            is_read = False
    return {"type": "image_url", "source": block["source"]} if is_read else None


def _found(block: dict[str, Any]) -> str:
    """Returns a result of a search as a text."""
    lines = [f"Title: {title}"] if (title := text(block.get("title"))) else []
    source = block.get("source")
    if isinstance(source, dict):
        source = source.get("url") or source.get("text")
    if source:
        lines.append(f"Source: {source}")
    content = block.get("content")
    if not isinstance(content, list | None):
        raise RequestError("bad_request")
    texts = [one for part in content or () if (one := _text_found(part))]
    return "\n".join([*lines, "Content: " + "\n".join(texts)] if texts else lines)


def _text_found(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text", "text": _} | str():
            raise RequestError("bad_request")
    return ""


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    is_text = len(parts) == 1 and parts[0]["type"] == "text"
    return parts[0]["text"] if is_text else list(parts)


def _call(block: dict[str, Any], *, is_read: bool) -> dict[str, Any]:
    """Returns a call of a tool. is_read: whether its arguments become an object again."""
    call_id, name, arguments = (block.get(key) for key in ("id", "name", "input"))
    is_named = isinstance(call_id, str) and isinstance(name, str)
    if not is_named or not isinstance(block.get("input", {}), dict):
        raise RequestError("bad_request")
    if not call_id:
        raise RequestError("unsupported_content")  # the engine draws one
    given = as_read(arguments or {})
    if not is_read:
        given = json.dumps(given)
    return {"id": call_id, "function": {"name": name, "arguments": given}}


def _results(block: dict[str, Any], rules: SglangRules) -> Messages:
    """Returns the turns of a tool's result: one, and more where it refers to tools."""
    call_id = text(block.get("tool_use_id")) or text(block.get("id")) or ""
    content = block.get("content")
    contents: list[object] = [content or ""]
    if isinstance(content, list):
        contents = [_joined(parts) for parts in _groups(content, rules)] or [""]
    elif not isinstance(content, str | None):
        raise RequestError("bad_request")
    return [{"role": "tool", "tool_call_id": call_id, "content": one} for one in contents]


def _groups(content: list[dict[str, Any]], rules: SglangRules) -> list[Messages]:
    """Returns the parts of a tool's result, those that refer to tools apart from the others."""
    groups: list[Messages] = []
    for part in _parts_of_result(content):
        kinds = {one["type"] == TOOL_REFERENCE for one in (part, *(groups[-1] if groups else ()))}
        if groups and (len(kinds) == 1 or not rules.splits_references):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _parts_of_result(content: list[dict[str, Any]]) -> Messages:
    """Returns the parts of a tool's result, without those that are empty or of other kinds."""
    found = []
    for block in content:
        kind = _kind(block)
        if kind == "tool_reference":
            name = text(block.get("tool_name")) or text(block.get("name"))
            if name:
                found.append({"type": TOOL_REFERENCE, "name": name})
        elif kind in ("text", "image", "search_result"):
            part = _part(block)
            if part is not None and part.get("text") != "":
                found.append(part)
    return found


def _result_text(block: dict[str, Any]) -> str:
    """Returns the texts of a tool's result."""
    content = block.get("content")
    if not isinstance(content, list):
        return text(content) or ""
    return "\n".join([one["text"] for one in _parts_of_result(content) if one["type"] == "text"])


def _tools(body: _SglangMessagesBody, rules: SglangRules) -> Messages | None:
    offered = [tool for tool in body.tools or () if not _is_servers(tool)]
    choice = (body.tool_choice or {}).get("type", "auto")
    named: object = _CHOICES.get(choice) if isinstance(choice, str) else None
    if choice == "tool":
        named = {"function": {"name": (body.tool_choice or {}).get("name")}}
    elif named is None:
        raise RequestError("bad_request")
    return printed_tools([_tool(tool, rules) for tool in offered], named, rules)


def _is_servers(tool: dict[str, Any]) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(_SERVER_TOOLS)


def _tool(tool: dict[str, Any], rules: SglangRules) -> dict[str, Any]:
    schema, strict = tool.get("input_schema"), flag(tool.get("strict", False))
    if not isinstance(schema, dict) or strict is None:
        raise RequestError("bad_request")
    function = {
        "name": tool.get("name"),
        "description": text(tool.get("description")) or "",
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": strict and rules.takes_strict,
    }
    if not rules.takes_strict:
        del function["strict"]
    return {"defer_loading": tool.get("defer_loading"), "function": function}


def _effort(body: _SglangMessagesBody) -> str:
    """Returns the effort, which sets no switches here. The engine has no "xhigh" in this API."""
    effort = effort_in((body.output_config or {}).get("effort"))
    if effort in ("none", "ultra"):
        raise RequestError("bad_request")
    return "max" if effort == "xhigh" else effort


def _thinking(body: _SglangMessagesBody, rules: SglangRules) -> bool | None:
    """Returns whether thinking is switched on or off; None if nothing is.

    Raises:
        RequestError: the engine refuses to switch it on, as it has no reasoning parser.
    """
    if body.thinking is None:
        return None
    kind = body.thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise RequestError("bad_request")
    if rules.wrapping is not None:
        return bool(kind != "disabled")
    if kind != "disabled":
        raise RequestError("bad_request")
    return None
