"""OpenAI's responses as SGLang turns them into a chat completion.

Source: SGLang 0.5.16 to 0.5.23, srt/entrypoints/openai/serving_responses.py, responses_adapters.py
and protocol.py. Models with code of their own for this API (gpt-oss, Beam, Muse) are not keyed.
"""

import base64
import json
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.dialect import Dialect
from extproc.requests.lax_values import flag
from extproc.requests.prompt import InferenceRequest
from extproc.requests.sglang_chat import (
    Messages,
    TemplateSettings,
    conversation,
    effort_in,
    printed_tools,
)
from extproc.requests.sglang_fields import as_read
from extproc.requests.sglang_rules import SglangRules
from kvstate.undecodable import UNDECODABLE

_LABEL = "Developer instructions:"

# How reasoning begins that a client sends back encoded: zlib in URL-safe base64.
_STATE = "sglang-reasoning-v1."
_MOST_STATE = 4 * 1024 * 1024

# What a custom tool takes, as a function.
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": ["input"],
    "additionalProperties": False,
}

# Keys of a message that no template gets.
_UNSENT = ("id", "status", "type")


class _SglangResponsesBody(msgspec.Struct):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


_body = msgspec.json.Decoder(_SglangResponsesBody)


def parse(content: bytes, rules: SglangRules, dialect: Dialect) -> InferenceRequest:
    """Parses the body of a response request for SGLang.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no such request.
    """
    body = _body.decode(content)
    if not rules.converts:
        raise RequestError("unsupported_by_engine")
    if body.previous_response_id is not None:
        raise RequestError("unsupported_previous_response")
    if body.extra_key is not None:
        raise RequestError("unsupported_extra_key")
    messages = _messages(body, rules)
    merged = _merged_systems(messages)
    if merged is not None and not rules.keeps_system_turns:
        messages, merged = merged, None
    settings = TemplateSettings(
        tools=_tools(body, rules),
        effort=_effort(body.reasoning),
        keywords=_keywords(body),
        merged=merged,
        checks_calls=False,
    )
    chat = conversation(messages, settings, rules, dialect)
    return InferenceRequest(body.model, [chat], body.cache_salt)


def _keywords(body: _SglangResponsesBody) -> dict[str, Any]:
    """Returns the arguments of the template that a request gives."""
    given = body.chat_template_kwargs or {}
    if given.get("reasoning_effort", "") is None:
        raise RequestError("unsupported_template_kwargs")  # it takes the effort away
    return given


def _effort(reasoning: dict[str, Any] | None) -> str:
    if reasoning is None:
        return ""
    if "effort" not in reasoning and reasoning.get("reasoning_effort") == "none":
        raise RequestError("unsupported_reasoning_effort")  # only some releases read it
    return effort_in(reasoning.get("effort", "medium"))


def _messages(body: _SglangResponsesBody, rules: SglangRules) -> Messages:
    turns = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for item in items:
        turn = _turn(item, rules)
        if turn is not None:
            _add(turns, turn, rules)
    return turns


def _turn(item: dict[str, Any], rules: SglangRules) -> dict[str, Any] | None:
    """Returns the turn that an item is, None for an empty one."""
    kind = item.get("type")
    if item.get("role") == "developer":
        content = item.get("content")
        item = {
            **item,
            "role": "system",
            "content": _labelled(content) if rules.labels_developers else content,
        }
    if kind in ("custom_tool_call", "custom_tool_call_output") and not rules.takes_custom_tools:
        raise RequestError("bad_request")
    match kind:
        case "function_call":
            return _call(item, item.get("arguments"))
        case "custom_tool_call":
            payload = item.get("input") or ""
            return _call(item, json.dumps({"input": payload}, ensure_ascii=False))
        case "function_call_output" | "custom_tool_call_output":
            return _result(item, rules)
        case "reasoning":
            return _reasoning(item, rules)
        case None | "message":
            return _message(item, rules)
    raise RequestError("bad_request")


def _labelled(content: object) -> object:
    if isinstance(content, str):
        return f"{_LABEL}\n{content}"
    if not isinstance(content, list):
        return content
    for place, part in enumerate(content):
        match part:
            case {"text": str(text)}:
                labelled = {**part, "text": f"{_LABEL}\n{text}"}
                return [*content[:place], labelled, *content[place + 1 :]]
    return [{"type": "input_text", "text": _LABEL}, *content]


def _call(item: dict[str, Any], arguments: object) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            is_object = isinstance(msgspec.json.decode(arguments), dict)
        except UNDECODABLE:
            is_object = False
        written = arguments if is_object else "{}"
    elif isinstance(arguments, dict):
        written = msgspec.json.encode(as_read(arguments)).decode()
    else:
        written = "{}"
    function = {"name": item.get("name"), "arguments": written}
    call_id = item.get("call_id") or item.get("id")
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _result(item: dict[str, Any], rules: SglangRules) -> dict[str, Any]:
    output = item.get("output", "")
    if isinstance(output, list) and rules.joins_outputs:
        texts = [part.get("text", "") for part in output if isinstance(part, dict)]
        if not all(isinstance(one, str) for one in texts):
            raise RequestError("bad_request")
        output = "".join(texts)
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}


def _reasoning(item: dict[str, Any], rules: SglangRules) -> dict[str, Any] | None:
    thoughts = _thoughts(item.get("summary")) or _thoughts(item.get("content"))
    if not thoughts and rules.takes_custom_tools:
        thoughts = [decoded] if (decoded := decoded_state(item.get("encrypted_content"))) else []
    if not thoughts:
        return None
    return {"role": "assistant", "reasoning_content": "\n".join(thoughts)}


def _thoughts(parts: object) -> list[str]:
    if not isinstance(parts, list | str | dict | None):
        raise RequestError("bad_request")
    parts = parts if isinstance(parts, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str) and text]


def decoded_state(state: object) -> str:
    """Returns the reasoning that a client sends back encoded; "" for another engine's.

    Raises:
        RequestError: it is larger than a body may be.
    """
    if not isinstance(state, str) or not state.startswith(_STATE):
        return ""
    inflater = zlib.decompressobj()
    try:
        packed = base64.urlsafe_b64decode(state[len(_STATE) :])
        text = inflater.decompress(packed, _MOST_STATE)
        if inflater.unconsumed_tail:
            raise RequestError("too_many_bytes")
        return text.decode() if inflater.eof else ""
    except (ValueError, zlib.error):
        return ""


def _message(item: dict[str, Any], rules: SglangRules) -> dict[str, Any]:
    if not rules.keeps_phases:
        item = {**item, "phase": None}
    turn = {key: value for key, value in item.items() if value is not None and key not in _UNSENT}
    content = turn.get("content")
    if isinstance(content, list):
        turn["content"] = [_part(part) for part in content]
    return turn


def _part(part: object) -> object:
    match part:
        case {"type": "input_text" | "output_text", "text": written}:
            return {"type": "text", "text": written}
        case {"type": "input_text" | "output_text"}:
            return {"type": "text", "text": ""}
        case {"type": "input_image", **fields}:
            return {"type": "image_url", **fields}
    return part


def _add(turns: Messages, turn: dict[str, Any], rules: SglangRules) -> None:
    """Adds a turn, or what it has to the model's turn before it."""
    last = turns[-1] if turns else None
    if last is None or last.get("role") != "assistant" or turn.get("role") != "assistant":
        turns.append(turn)
        return
    is_only_reasoning = rules.adds_to_reasoning and set(last) == {"role", "reasoning_content"}
    if last.get("phase") != turn.get("phase") and not is_only_reasoning:
        turns.append(turn)
        return
    if turn.get("phase") is not None:
        last["phase"] = turn["phase"]
    if turn.get("content"):
        last["content"] = _both(last.get("content"), turn["content"])
    if turn.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
    if turn.get("reasoning_content"):
        thoughts = filter(None, (last.get("reasoning_content"), turn["reasoning_content"]))
        last["reasoning_content"] = "\n".join(thoughts)


def _both(before: object, after: object) -> object:
    if not before:
        return after
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}\n\n{after}"
    return [*_parts_of(before), *_parts_of(after)]


def _parts_of(content: object) -> Iterable[object]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if isinstance(content, str) else []


def _merged_systems(messages: Messages) -> Messages | None:
    """Returns the messages with all system turns in one; None if there is none."""
    chunks: list[str] = []
    others: Messages = []
    for message in messages:
        if message.get("role") != "system":
            others.append(message)
            continue
        content = message.get("content")
        if isinstance(content, str):
            chunks.append(content)
        elif isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            chunks += [text for text in texts if isinstance(text, str)]
    if len(others) == len(messages):
        return None
    return [{"role": "system", "content": "\n\n".join(chunks)}, *others] if chunks else others


def _tools(body: _SglangResponsesBody, rules: SglangRules) -> Messages | None:
    functions = [one for tool in body.tools or () for one in _function(tool, rules)]
    kinds = [tool.get("type") for tool in body.tools or ()]
    if body.tool_choice == "required" and not {"function", "custom"}.intersection(map(str, kinds)):
        raise RequestError("bad_request")
    choice = _choice(body.tool_choice) if functions else None
    return printed_tools(functions, choice, rules, replaces_types=False)


def _choice(choice: object) -> object:
    """Returns the choice as a chat completion has it; kinds that cannot be forced mean "auto"."""
    if not isinstance(choice, dict):
        return choice
    name = choice.get("name")
    if choice.get("type") not in ("function", "custom") or not isinstance(name, str) or not name:
        return "auto"
    return {"function": {"name": name}}


def _function(tool: dict[str, Any], rules: SglangRules) -> list[dict[str, Any]]:
    """Returns the function that a tool is, none for tools that run elsewhere."""
    kind, name, strict = tool.get("type"), tool.get("name"), flag(tool.get("strict", False))
    if kind == "shell" or strict is None:
        raise RequestError("bad_request")
    description, parameters = tool.get("description"), tool.get("parameters")
    if kind == "custom" and name and rules.takes_custom_tools:
        description, parameters = _of_custom(tool), _CUSTOM_PARAMETERS
    elif kind != "function":
        return []
    printed = {
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": strict,
    }
    return [{"function": printed}]


def _of_custom(tool: dict[str, Any]) -> str | None:
    """Returns the description of a custom tool, with the grammar of what it takes."""
    description, form = tool.get("description"), tool.get("format")
    texts = [description] if isinstance(description, str) and description else []
    match form:
        case {"type": "grammar", **grammar}:
            syntax, definition = grammar.get("syntax") or "lark", grammar.get("definition") or ""
            texts.append(f"The payload must conform to this {syntax} grammar:\n{definition}")
    return "\n\n".join(texts) or None
