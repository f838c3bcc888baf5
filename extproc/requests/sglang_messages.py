"""Anthropic's messages as SGLang turns them into a chat completion.

Source: SGLang 0.5.16 to 0.5.23, srt/entrypoints/anthropic/protocol.py and serving.py.
"""

from typing import Any

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.dialect import Dialect
from extproc.requests.prompt import InferenceRequest
from extproc.requests.sglang_chat import (
    Messages,
    TemplateSettings,
    conversation,
    effort_in,
    printed_tools,
)
from extproc.requests.sglang_rules import SglangRules

# Anthropic's names for tool_choice, and those of chat completions.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

# Kinds of tools that the engine leaves out: their provider runs them.
_SERVER_TOOLS = ("web_search_", "computer_", "bash_", "text_editor_")


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
    cache_salt: str | None = None


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
    return InferenceRequest(body.model, [chat], body.cache_salt)


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
    match block:
        case {"type": "text", "text": str(text)}:
            return text
    raise RequestError("unsupported_content")


def _trimmed(content: str | list[dict[str, Any]]) -> str:
    texts = [content] if isinstance(content, str) else map(_text, content)
    return "\n".join(filter(None, (text.strip() for text in texts)))


def _turns(message: _SglangMessage, rules: SglangRules) -> Messages:
    """Returns the turns that a message becomes: results of tools are turns of their own."""
    if message.role not in ("user", "assistant", "system"):
        raise RequestError("bad_request")
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "user":
        return _of_user(message.content)
    return [_of_others(message, rules)]


def _of_user(blocks: list[dict[str, Any]]) -> Messages:
    turns: Messages = []
    parts: list[dict[str, Any]] = []

    def end_parts() -> None:
        if parts:
            turns.append({"role": "user", "content": _joined(parts)})
            parts.clear()

    for block in blocks:
        if block.get("type") == "tool_result":
            end_parts()
            turns.append(_result(block))
        else:
            parts.append(_part(block))
    end_parts()
    return turns


def _of_others(message: _SglangMessage, rules: SglangRules) -> dict[str, Any]:
    """Returns the turn of a model, or a system turn that is given in blocks."""
    blocks = message.content
    assert isinstance(blocks, list)
    thoughts, parts, calls = [], [], []
    for block in blocks:
        match block:
            case {"type": "redacted_thinking"}:
                raise RequestError("bad_request")  # the engine refuses it
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "tool_use"}:
                calls.append(_call(block))
            case _:
                parts.append(_part(block))
    wrapping, thoughts = rules.wrapping, list(filter(None, thoughts))
    if thoughts and wrapping is not None and message.role == "assistant":
        text = "\n".join(thoughts)
        wrapped = f"{wrapping.before}{text}\n{wrapping.after}"
        parts.insert(0, {"type": "text", "text": wrapped})
    turn: dict[str, Any] = {"role": message.role}
    if calls:
        turn["tool_calls"] = calls
    if parts or not calls:
        turn["content"] = _joined(parts) if parts else ""
    return turn


def _part(block: dict[str, Any]) -> dict[str, Any]:
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image", "source": dict(source)} if source.get("data") or source.get("url"):
            return {"type": "image_url", "source": source}
    raise RequestError("unsupported_content")


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    is_text = len(parts) == 1 and parts[0]["type"] == "text"
    return parts[0]["text"] if is_text else list(parts)


def _call(block: dict[str, Any]) -> dict[str, Any]:
    call_id, name, arguments = (block.get(key) for key in ("id", "name", "input"))
    if not call_id or not isinstance(name, str) or not isinstance(arguments, dict | None):
        raise RequestError("bad_request")
    written = msgspec.json.encode(arguments or {}).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}


def _result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if content is not None and not isinstance(content, str | list):
        raise RequestError("bad_request")
    told: str | list[dict[str, Any]] = content if isinstance(content, str) else ""
    if isinstance(content, list):
        parts = [part for part in map(_part, content) if part.get("text") != ""]
        told = _joined(parts) if parts else ""
    call_id = block.get("tool_use_id") or block.get("id") or ""
    return {"role": "tool", "tool_call_id": call_id, "content": told}


def _tools(body: _SglangMessagesBody, rules: SglangRules) -> Messages | None:
    offered = [tool for tool in body.tools or () if not _is_servers(tool)]
    choice = (body.tool_choice or {}).get("type", "auto")
    named: object = _CHOICES.get(choice) if isinstance(choice, str) else None
    if choice == "tool":
        named = {"function": {"name": (body.tool_choice or {}).get("name")}}
    elif named is None:
        raise RequestError("bad_request")
    return printed_tools([_tool(tool) for tool in offered], named, rules)


def _is_servers(tool: dict[str, Any]) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(_SERVER_TOOLS)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema, strict = tool.get("input_schema"), tool.get("strict", False)
    if not isinstance(schema, dict) or not isinstance(strict, bool):
        raise RequestError("bad_request")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description") or "",
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": strict,
    }
    return {"defer_loading": tool.get("defer_loading"), "function": function}


def _effort(body: _SglangMessagesBody) -> str:
    """Returns the effort, which sets no switches here. The engine has no "xhigh" in this API."""
    effort = effort_in((body.output_config or {}).get("effort"))
    if effort == "none":
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
