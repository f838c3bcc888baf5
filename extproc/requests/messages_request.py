"""Anthropic's messages (POST /v1/messages), which vLLM turns into a conversation.

Source: vLLM 0.19.1, 0.24.0 to 0.32.0; earlier releases wrote tool results in another form. System
turns among the messages stay in their place here, and the effort is only named: what becomes of
both depends on the release, and on the template (`extproc.templates`). An empty list of tools
reaches the template, while it is refused in chat completions.
"""

from typing import Any, NamedTuple

import msgspec

from extproc.base.errors import RequestError
from extproc.requests import sglang_messages
from extproc.requests.chat_request import (
    Options,
    SentMessage,
    conversation,
    effort_in,
    printed_tools,
)
from extproc.requests.dialect import Dialect, Effort, Speaks, agreed
from extproc.requests.known_messages import KnownMessages
from extproc.requests.known_tools import read_tools
from extproc.requests.prompt import (
    DISABLED,
    INLINE_SYSTEM,
    MAX_MESSAGES,
    NULL,
    InferenceRequest,
)

PATH = "/v1/messages"

# A line that some clients change with every request; the engine drops it if it is its own block.
BILLING_LINE = "x-anthropic-billing-header"

# Anthropic's names for tool_choice, and those of chat completions; "none" is not keyed.
_CHOICES = {"auto": "auto", "any": "required", "tool": "required"}


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _MessagesBody(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str | None = None
    max_tokens: float | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: msgspec.Raw = NULL
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None


class _KnownMessage(NamedTuple):
    """What is known of a message: its role, and the chat messages that it makes."""

    role: str
    chat: tuple[SentMessage, ...]


def _read(written: bytes) -> _KnownMessage:
    message = _message.decode(written)
    return _KnownMessage(message.role, tuple(map(SentMessage, _converted(message))))


_body = msgspec.json.Decoder(_MessagesBody)
_message = msgspec.json.Decoder(_Message)
_known = KnownMessages(_read)


def parse(content: bytes, speaks: Speaks = agreed) -> InferenceRequest:
    """Parses the body of a messages request.

    speaks: as in `extproc.requests.request.parse`.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no such request.
    """
    body = _body.decode(content)
    dialect = speaks(body.model)
    if dialect is not None and dialect.is_rust:
        raise RequestError("unsupported_by_engine")  # it answers 404 or 501
    if dialect is not None and dialect.sglang is not None:
        return sglang_messages.parse(content, dialect.sglang, dialect)
    if body.chat_template_kwargs:
        raise RequestError("unsupported_template_kwargs")
    if body.kv_transfer_params and body.kv_transfer_params.get("prompt_token_ids") is not None:
        raise RequestError("unsupported_kv_transfer")
    _check_budget(body)
    messages = _system(body.system)
    if dialect is not None and dialect.is_foreign and isinstance(body.system, list):
        raise RequestError("unsupported_by_engine")  # SGLang joins these by newlines
    if len(body.messages) > MAX_MESSAGES:
        raise RequestError("too_many_messages")
    sent = _known.read(body.messages)
    known = [*map(SentMessage, messages), *[one for message in sent for one in message.chat]]
    messages = [one.sent for one in known]
    effort, rule = _effort(body, dialect)
    inline = any(message.role == "system" for message in sent)
    tools = read_tools(body.tools)
    options = Options(
        tools=None if tools is None else tools.printed(PATH, _printed_tools),
        tool_choice=_choice(body.tool_choice),
        may_have_no_tools=dialect is not None,
        response_format=(body.output_config or {}).get("format"),
        effort=effort,
        effort_rule=rule,
        dialect=dialect,
        forms=INLINE_SYSTEM if inline else 0,
    )
    return InferenceRequest(body.model, [conversation(messages, options, known)], body.cache_salt)


def _check_budget(body: _MessagesBody) -> None:
    """Checks the tokens that a request may think, except where it only fills a cache.

    Raises:
        RequestError: they are as many as it may answer, which engines refuse.
    """
    budget = (body.thinking or {}).get("budget_tokens")
    if not isinstance(budget, int) or body.max_tokens is None or budget < body.max_tokens:
        return
    if not (body.kv_transfer_params or {}).get("do_remote_decode"):
        raise RequestError("bad_request")


def _effort(body: _MessagesBody, dialect: Dialect | None) -> tuple[str, Effort | None]:
    """Returns the effort of a request, and what templates get of it."""
    effort = effort_in((body.output_config or {}).get("effort"))
    rule = None if dialect is None else dialect.messages_effort
    if (body.thinking or {}).get("type") != "disabled":
        return effort, rule
    if dialect is None or dialect.turns_off_thinking:
        return DISABLED, rule
    return (effort, rule) if effort else (DISABLED, Effort.IGNORED)


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    kept = _texts(system)
    if not any(kept):
        raise RequestError(
            "unsupported_content"
        )  # an empty message in some releases, none in others
    return [{"role": "system", "content": "".join(kept)}]


def _converted(message: _Message) -> list[dict[str, Any]]:
    """Returns a message as chat messages; tool results become separate ones, before the rest."""
    if message.role == "system":
        return _inline_system(message.content)
    if message.role not in ("user", "assistant"):
        raise RequestError("bad_request")
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "user":
        return _of_user(message.content)
    return [_of_assistant(message.content)]


def _inline_system(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a system turn as one text, without billing headers; none if it is empty."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if any(block.get("type") in ("tool_addition", "tool_removal") for block in blocks):
        raise RequestError("unsupported_tools")
    text = "".join(_texts(blocks))
    return [{"role": "system", "content": text}] if text else []


def _texts(blocks: list[dict[str, Any]]) -> list[str]:
    texts = [block.get("text") for block in blocks if block.get("type") == "text"]
    return [text for text in texts if isinstance(text, str) and not text.startswith(BILLING_LINE)]


def _of_user(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            results += _tool_result(block)
        else:
            parts += _parts(block)
    return [*results, {"role": "user", "content": _joined(parts)}] if parts else results


def _of_assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant"}
    parts: list[dict[str, Any]] = []
    for block in blocks:  # no match: its patterns of objects take a microsecond each
        kind, thought = block.get("type"), block.get("thinking")
        if kind == "thinking" and isinstance(thought, str):
            turn["reasoning"] = turn.get("reasoning", "") + thought
        elif kind == "tool_use":
            turn.setdefault("tool_calls", []).append(_call(block))
        elif kind != "redacted_thinking":  # that is opaque, and left out
            parts += _parts(block)
    return {**turn, "content": _joined(parts)} if parts else turn


def _parts(block: dict[str, Any]) -> list[dict[str, Any]]:
    match block:
        case {"type": "text", "text": str(text)}:
            return [{"type": "text", "text": text}] if text else []
        case {"type": "image", "source": dict(source)} if source:
            return [{"type": "image_url", "source": source}]
    raise RequestError("unsupported_content")


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    text = parts[0].get("text") if len(parts) == 1 else None
    return text if isinstance(text, str) else parts


def _call(block: dict[str, Any]) -> dict[str, Any]:
    call_id, name, arguments = block.get("id"), block.get("name"), block.get("input")
    if not call_id or not isinstance(name, str) or not isinstance(arguments, dict | None):
        raise RequestError("bad_request")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the result's texts joined, and its images in a user message after it."""
    content = block.get("content")
    texts = [content] if isinstance(content, str) else []
    images = []
    for item in content if isinstance(content, list) else ():
        match item:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "image", "source": dict(source)} if source:
                images.append({"type": "image_url", "source": source})
            case _:
                raise RequestError("unsupported_content")
    call_id = block.get("tool_use_id") or ""
    result = {"role": "tool", "content": "\n".join(texts), "tool_call_id": call_id}
    return [result, {"role": "user", "content": images}] if images else [result]


def _printed_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return printed_tools([_tool(tool) for tool in tools])


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RequestError("unsupported_tools")  # a tool of the provider's own
    if tool.get("strict") is not None or tool.get("defer_loading") is not None:
        raise RequestError("unsupported_tools")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
    }
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any] | None) -> object:
    if choice is None:
        return None
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    return _CHOICES.get(kind, "none") if isinstance(kind, str) else "none"
