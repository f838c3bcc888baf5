"""Anthropic's messages (POST /v1/messages), which vLLM turns into a conversation.

Source: vLLM 0.19.1, 0.24.0 to 0.33.0; earlier releases wrote tool results in another form. System
turns among the messages stay in their place here, and the effort is only named: what becomes of
both depends on the release, and on the template (`extproc.templates`). An empty list of tools
reaches the template, while it is refused in chat completions.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from extproc.base.errors import RequestError
from extproc.requests import sglang_messages
from extproc.requests.chat_request import (
    TOOL_REFERENCE,
    ChatOptions,
    SentMessage,
    conversation,
    effort_in,
)
from extproc.requests.dialect import Dialect, DialectFor, Effort, agreed
from extproc.requests.function_tools import FLAGS, printed_tools
from extproc.requests.given_ids import given_ids
from extproc.requests.known_messages import KnownMessages
from extproc.requests.known_tools import PrintedTools, ToolList, Tools, read_tools
from extproc.requests.prompt import (
    DISABLED,
    INLINE_SYSTEM,
    LEFT_OUT,
    MAX_MESSAGES,
    NULL,
    TOOL_FIELDS,
    InferenceRequest,
    is_given,
)
from extproc.requests.tool_changes import TOOL_CHANGES, ToolChange, changed_tools

PATH = "/v1/messages"

# A line that some clients change with every request; the engine drops it if it is its own block.
BILLING_LINE = "x-anthropic-billing-header"

# Anthropic's names for tool_choice, and those of chat completions; "none" is not keyed.
_CHOICES = {"auto": "auto", "any": "required", "tool": "required"}


# Blocks that are left out: what they say is not for templates, or not of this role.
_OPAQUE = frozenset(("redacted_thinking", "tool_reference"))
_ONLY_OF_MODELS = frozenset(("thinking", "tool_use", *_OPAQUE))

# The kinds of a result's parts that have an effect; the others are left out.
_RESULT_PARTS = frozenset(("text", "image", "tool_reference"))


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
    kv_transfer_params: msgspec.Raw = NULL
    cache_salt: str | None = None


class _KnownMessage(NamedTuple):
    """What is known of a message: the chat messages that it makes, and its forms.

    changes: how it changes the tools.
    """

    chat: tuple[SentMessage, ...]
    forms: int = 0
    changes: tuple[ToolChange, ...] = ()


def _read(written: bytes) -> _KnownMessage:
    message = _message.decode(written)
    chat = tuple(map(SentMessage, _converted(message)))
    forms = LEFT_OUT if _leaves_out(message) else 0
    forms |= INLINE_SYSTEM if message.role == "system" else 0
    return _KnownMessage(chat, forms, _changes(message))


_body = msgspec.json.Decoder(_MessagesBody)
_message = msgspec.json.Decoder(_Message)
_transfer = msgspec.json.Decoder(dict[str, Any] | None)
_known = KnownMessages(_read)


def parse(content: bytes, dialect_for: DialectFor = agreed) -> InferenceRequest:
    """Parses the body of a messages request.

    dialect_for: as in `extproc.requests.request.parse`.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no such request.
    """
    body = _body.decode(content)
    dialect = dialect_for(body.model)
    if dialect is not None and dialect.is_rust:
        raise RequestError("unsupported_by_engine")  # it answers 404 or 501
    if dialect is not None and dialect.sglang is not None:
        return sglang_messages.parse(content, dialect.sglang, dialect)
    _check_budget(body)
    messages = _system(body.system)
    # the empty message of some releases, and the arguments that some do not take
    forms = LEFT_OUT if (body.system and not messages) or body.chat_template_kwargs else 0
    if dialect is not None and dialect.is_foreign and isinstance(body.system, list):
        raise RequestError("unsupported_by_engine")  # SGLang joins these by newlines
    if len(body.messages) > MAX_MESSAGES:
        raise RequestError("too_many_messages")
    sent = _known.read(body.messages)
    known = [*map(SentMessage, messages), *[one for message in sent for one in message.chat]]
    messages = [one.sent for one in known]
    given = given_ids(body.kv_transfer_params, dialect, messages)
    if given is not None:
        return InferenceRequest(body.model, [given], body.cache_salt)
    effort, rule = _effort(body, dialect)
    # releases that take arguments for templates know the flags of tools as well
    takes_arguments = dialect is None or dialect.takes_arguments
    for of_one in {message.forms for message in sent}:
        forms |= of_one
    options = ChatOptions(
        template_kwargs=body.chat_template_kwargs if takes_arguments else None,
        tools=_tools(read_tools(body.tools), sent, has_flags=takes_arguments),
        tool_choice=_choice(body.tool_choice),
        may_have_no_tools=dialect is not None,
        response_format=(body.output_config or {}).get("format"),
        effort=effort,
        effort_rule=rule,
        dialect=dialect,
        forms=forms,
    )
    chat = conversation(messages, options, known)
    needs_text = is_given(body.kv_transfer_params)
    return InferenceRequest(body.model, [chat], body.cache_salt, needs_text=needs_text)


def _check_budget(body: _MessagesBody) -> None:
    """Checks the tokens that a request may think, except where it only fills a cache.

    Raises:
        RequestError: they are as many as it may answer, which engines refuse.
    """
    budget = (body.thinking or {}).get("budget_tokens")
    if not isinstance(budget, int) or body.max_tokens is None or budget < body.max_tokens:
        return
    transfer = _transfer.decode(body.kv_transfer_params) or {}
    if not transfer.get("do_remote_decode"):
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
    return [{"role": "system", "content": "".join(kept)}] if any(kept) else []


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
    text = "".join(_texts(blocks))
    return [{"role": "system", "content": text}] if text else []


def _texts(blocks: list[dict[str, Any]]) -> list[str]:
    texts = [block.get("text") for block in blocks if block.get("type") == "text"]
    return [text for text in texts if isinstance(text, str) and not text.startswith(BILLING_LINE)]


def _of_user(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            results += _tool_result(block)
        elif kind not in _ONLY_OF_MODELS:
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
        elif kind == "tool_result":
            result = block.get("content")
            parts.append({"type": "text", "text": f"Tool result: {result or ''}"})
        elif kind not in _OPAQUE:
            parts += _parts(block)
    return {**turn, "content": _joined(parts)} if parts else turn


def _leaves_out(message: _Message) -> bool:
    """Returns whether a message has blocks that the engine leaves out, or writes as it writes none
    of a client.
    """
    if isinstance(message.content, str) or message.role == "system":
        return False
    kinds = {block.get("type") for block in message.content}
    if message.role == "assistant":
        return bool(kinds & {"tool_result", "tool_reference"})
    results = [block for block in message.content if block.get("type") == "tool_result"]
    return bool(kinds & _ONLY_OF_MODELS) or any(map(_has_more_kinds, results))


def _has_more_kinds(result: dict[str, Any]) -> bool:
    content = result.get("content")
    items = content if isinstance(content, list) else []
    return any(item.get("type") not in _RESULT_PARTS for item in items)


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
    """Returns the result's texts joined, and after it its images, and the tools that it names."""
    content = block.get("content")
    texts = [content] if isinstance(content, str) else []
    images, names = [], []
    for item in content if isinstance(content, list) else ():
        match item:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "image", "source": dict(source)} if source:
                images.append({"type": "image_url", "source": source})
            case {"type": "tool_reference"}:
                name = item.get("tool_name") or item.get("name")
                names += [{"type": TOOL_REFERENCE, "name": name}] if name else []
            case {"type": str(kind)} if kind not in ("text", "image"):
                continue  # see `_leaves_out`
            case _:
                raise RequestError("unsupported_content")
    call_id = block.get("tool_use_id") or ""
    result = {"role": "tool", "content": "\n".join(texts), "tool_call_id": call_id}
    of_images = [{"role": "user", "content": images}] if images else []
    named = [{"role": "tool", "content": names, "tool_call_id": call_id}] if names else []
    return [result, *of_images, *named]


def _changes(message: _Message) -> tuple[ToolChange, ...]:
    """Returns the tools that a system turn adds and removes; no other turn may.

    Raises:
        RequestError: it does not say which.
    """
    if message.role != "system" or isinstance(message.content, str):
        return ()
    changes = [block for block in message.content if block.get("type") in TOOL_CHANGES]
    return tuple(map(ToolChange.read, changes))


def _tools(
    tools: ToolList | None, sent: Sequence[_KnownMessage], *, has_flags: bool
) -> PrintedTools | None:
    """Returns the tools at the end of a conversation; None if there are none.

    has_flags: whether the engine passes on what Anthropic's tools say besides.
    """
    printed = partial(_printed_tools, has_flags=has_flags)
    changes = [change for message in sent for change in message.changes]
    if not changes:
        return None if tools is None else tools.printed((PATH, has_flags), printed)
    made = printed(changed_tools([] if tools is None else tools.sent, changes))
    return made._replace(forms=made.forms | LEFT_OUT)


def _printed_tools(tools: Tools, *, has_flags: bool) -> PrintedTools:
    made = printed_tools([_tool(tool, has_flags=has_flags) for tool in tools])
    are_set = any(tool.get(flag) is not None for tool in tools for flag in FLAGS)
    return made._replace(forms=TOOL_FIELDS if are_set else 0)


def _tool(tool: dict[str, Any], *, has_flags: bool) -> dict[str, Any]:
    """Returns a tool as one of chat completions; the engine's models name no other fields."""
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RequestError("unsupported_tools")  # a tool of the provider's own
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
    }
    flags = {flag: tool.get(flag) for flag in FLAGS} if has_flags else {}
    return {"type": "function", "function": {**function, **flags}}


def _choice(choice: dict[str, Any] | None) -> object:
    if choice is None:
        return None
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    return _CHOICES.get(kind, "none") if isinstance(kind, str) else "none"
