"""Chat completions as vLLM's Rust front end reads them.

Source: vLLM 0.33.0, rust/src/server/src/routes/openai (chat_completions/types.rs, convert.rs and
validate.rs, utils/types.rs) and rust/src/chat/src/renderer/hf: what a template gets of a message,
in this order of keys. Fields that the front end does not name are dropped, whatever they are;
where it refuses a request, the engine answers 400 and no prompt exists.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.costly_json import refuse_costly
from extproc.requests.dialect import Dialect
from extproc.requests.known_messages import KnownMessages, memory_of
from extproc.requests.known_tools import PrintedTools, read_tools
from extproc.requests.media import MEDIA_PARTS
from extproc.requests.prompt import (
    FRONT_END,
    MAX_MESSAGES,
    NO_TOOLS,
    NULL,
    Chat,
    InferenceRequest,
)
from kvstate.undecodable import UNDECODABLE

Message = dict[str, Any]

_EFFORTS = frozenset(("none", "minimal", "low", "medium", "high", "xhigh", "max"))

# The names under which a turn of the model may carry its reasoning; two of them are refused.
_REASONING = ("reasoning", "reasoning_content", "thinking")

# What templates get by name besides; arguments of the same name would replace it.
_RESERVED = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
    )
)

# Integers beyond these become floats in serde_json; so does minus zero, which Python reads as 0.
_LARGEST, _SMALLEST = 2**64 - 1, -(2**63)
_MINUS_ZERO = re.compile(rb"[:\[,]\s*-0\s*[,\]}]")

# serde_json reads a float with more digits with the last one maybe wrong.
_MOST_DIGITS = 15


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str | None = None
    tools: msgspec.Raw = NULL
    tool_choice: Any = None
    reasoning_effort: str | None = None
    response_format: Any = None
    documents: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    stream: bool | None = None
    cache_salt: str | None = None
    n: int | None = None


_body = msgspec.json.Decoder(_Body)
_sent = msgspec.json.Decoder(Message)


class _SentMessage:
    """A message as it was sent, and as templates get it; neither must be changed.

    arguments: of its tool calls, where they are JSON text within JSON.
    """

    __slots__ = ("_read", "arguments", "sent")

    def __init__(self, sent: Message) -> None:
        self.sent = sent
        self.arguments = tuple(_arguments_of(sent))
        self._read: Message | None = None

    @property
    def read(self) -> Message:
        """The message as templates get it, with its content as a text or in parts.

        Raises:
            RequestError: the front end refuses it, or it cannot be keyed.
        """
        if self._read is None:
            self._read = _message(self.sent)
        return self._read


def _has_minus_zero(content: bytes, messages: Sequence[msgspec.Raw]) -> bool:
    """Returns whether a minus zero may be in a body; in its messages there are only texts."""
    found = len(_MINUS_ZERO.findall(content))
    return found > 0 and found > sum(len(_MINUS_ZERO.findall(bytes(one))) for one in messages)


def _memory_of_arguments(messages: Iterable[_SentMessage]) -> int:
    texts = [text for one in messages for text in one.arguments]
    return sum(map(len, texts)) + sum(map(memory_of, texts))


_known = KnownMessages(lambda written: _SentMessage(_sent.decode(written)), _memory_of_arguments)


def parse(content: bytes, dialect: Dialect) -> InferenceRequest:
    """Parses the body of a chat completion for a Rust front end.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no chat completion.
    """
    if dialect.is_foreign:
        raise RequestError("unsupported_by_engine")  # SGLang's was not read
    body = _body.decode(content)
    if _has_minus_zero(content, body.messages):
        raise RequestError("unsupported_content")
    if body.truncate_prompt_tokens is not None:
        raise RequestError("unsupported_truncation")
    if body.chat_template is not None:
        raise RequestError("unsupported_client_template")
    if body.n is not None and body.n > 1:
        raise RequestError("bad_request")
    if len(body.messages) > MAX_MESSAGES:
        raise RequestError("too_many_messages")
    known = _known.read(body.messages)
    refuse_costly(b"\n".join([text for one in known for text in one.arguments]))
    tools = read_tools(body.tools)
    chat = conversation(
        [one.read for one in known],
        dialect,
        sent=[one.sent for one in known],
        tools=None if tools is None else tools.printed(__name__, _printed_tools).tools,
        tool_choice=body.tool_choice,
        effort=body.reasoning_effort or "",
        keywords=body.chat_template_kwargs or {},
        documents=body.documents,
        adds_prompt=body.add_generation_prompt,
        continues=body.continue_final_message,
    )
    chat = msgspec.structs.replace(
        chat,
        add_special_tokens=body.add_special_tokens,
        response_format=body.response_format,
    )
    reads_cache = body.prompt_logprobs is None and not body.echo
    return InferenceRequest(body.model, [chat], body.cache_salt, None, reads_cache)


def conversation(
    messages: Sequence[Message],
    dialect: Dialect,
    *,
    sent: Sequence[Message] = (),
    tools: list[Message] | None = None,
    tool_choice: object = None,
    effort: str = "",
    keywords: Mapping[str, Any] = {},
    documents: list[Any] | None = None,
    adds_prompt: bool | None = None,
    continues: bool = False,
) -> Chat:
    """Returns a conversation as the front end gives it to a template.

    messages: as `_SentMessage.read`. tools: as templates get them, None for none. keywords: the
    request's chat_template_kwargs.

    Raises:
        RequestError: the front end refuses it, or it cannot be keyed.
    """
    if not messages:
        raise RequestError("empty_prompt")
    if effort and effort not in _EFFORTS:
        raise RequestError("bad_request")
    if continues and (adds_prompt or messages[-1]["role"] != "assistant"):
        raise RequestError("bad_request")
    if not _RESERVED.isdisjoint(keywords):
        raise RequestError("unsupported_template_kwargs")
    offered = [*(tools or ()), *(one for each in messages for one in each.get("tools", ()))]
    forms = FRONT_END | _form_of_choice(tools, offered, tool_choice)
    variables: dict[str, Any] = {
        **_numbers(dict(keywords)),
        "add_generation_prompt": not continues and adds_prompt is not False,
        "continue_final_message": continues,
    }
    if offered:
        variables["tools"] = offered if len(offered) > len(tools or ()) else tools
    if documents is not None:
        variables["documents"] = _numbers(documents)
    return Chat(
        list(messages),
        variables,
        effort=effort,
        effort_rule=dialect.effort,
        dialect=dialect,
        forms=forms,
        sent=list(sent),
        tool_choice=tool_choice if tool_choice in ("required", "none") and offered else "",
    )


def in_its_terms(chat: Chat, dialect: Dialect) -> Chat:
    """Returns a conversation that was read for the other front end as this one reads it.

    Raises:
        RequestError: it refuses that, or it cannot be keyed.
    """
    given = dict(chat.variables)
    tools = given.pop("tools", None)
    adds_prompt = given.pop("add_generation_prompt", None)
    continues = given.pop("continue_final_message", False)
    sent = chat.sent or chat.messages
    return conversation(
        [_message(one) for one in sent],
        dialect,
        sent=sent,
        tools=None if tools is None else _printed_tools(tools).tools,
        effort=chat.effort,
        keywords=given,
        adds_prompt=adds_prompt,
        continues=continues,
    )


def _form_of_choice(
    tools: Sequence[Message] | None, offered: Sequence[Message], choice: object
) -> int:
    """Returns NO_TOOLS if tools are there and must not be used, else 0.

    With "none" the front end leaves the request's tools out if it was started with
    --exclude-tools-when-tool-choice-none.

    Raises:
        RequestError: the front end refuses the tools, or the choice of them.
    """
    if tools is not None and not tools:
        raise RequestError("bad_request")
    names = [one["function"]["name"] for one in offered]
    if len(set(names)) < len(names):
        raise RequestError("bad_request")
    match choice:
        case None:
            return 0
        case "auto" | "required" if names:
            return 0
        case "none":
            return NO_TOOLS if tools else 0
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            return 0
    raise RequestError("bad_request")


def _message(message: Message) -> Message:
    role = message.get("role")
    match role:
        case "assistant":
            return _turn(message)
        case "tool":
            call_id = message.get("tool_call_id")
            if not isinstance(call_id, str):
                raise RequestError("bad_request")
            return {"role": role, "content": _content(message), "tool_call_id": call_id}
        case "developer":
            own = message.get("tools")
            if not isinstance(own, list | None):
                raise RequestError("bad_request")
            tools = {"tools": _printed_tools(own).tools} if own else {}
            return {"role": role, "content": _content(message)} | tools
        case "function":
            raise RequestError("bad_request")
        case str():
            content = _content(message)
            if role == "user" and not content:
                raise RequestError("bad_request")
            return {"role": role, "content": content}
    raise RequestError("bad_request")


def _content(message: Message) -> str | list[Message]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("bad_request")
    return [_part(part) for part in content]


def _part(part: object) -> Message:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": str(kind)} if kind in MEDIA_PARTS:
            raise RequestError("unsupported_media")
    raise RequestError("bad_request")


def _turn(message: Message) -> Message:
    """Returns a turn of the model: its texts joined by nothing, its reasoning under both names."""
    keys = [key for key in _REASONING if key in message]
    reasoning = message[keys[0]] if keys else None
    if len(keys) > 1 or not isinstance(reasoning, str | None):
        raise RequestError("bad_request")
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None):
        raise RequestError("bad_request")
    content = "" if message.get("content") is None else _content(message)
    is_empty = content == [] or message.get("content") is None
    if is_empty and not reasoning and not calls:
        raise RequestError("bad_request")
    texts = content if isinstance(content, str) else "".join(part["text"] for part in content)
    read: Message = {"role": "assistant", "content": texts}
    if reasoning:
        read |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        read["tool_calls"] = [_call(call) for call in calls]
    return read


def _arguments_of(message: Message) -> Iterable[bytes]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        match call:
            case {"function": {"arguments": str(arguments)}}:
                yield arguments.encode("utf-8", "surrogatepass")


def _call(call: object) -> Message:
    """Returns a tool call with its arguments as any value of JSON."""
    match call:
        case {"id": str(call_id), "type": "function", "function": {"name": str(name)} as function}:
            arguments = function.get("arguments") or "{}"
            if not isinstance(arguments, str):
                raise RequestError("bad_request")
        case _:
            raise RequestError("bad_request")
    if _MINUS_ZERO.search(arguments.encode("utf-8", "surrogatepass")):
        raise RequestError("unsupported_tool_arguments")
    try:
        value = _numbers(msgspec.json.decode(arguments))
    except UNDECODABLE:  # which only some renderers in code accept
        raise RequestError("unsupported_tool_arguments") from None
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": value}}


def _printed_tools(tools: Sequence[Any]) -> PrintedTools:
    return PrintedTools([_tool(tool) for tool in tools])


def _tool(tool: object) -> Message:
    match tool:
        case {"function": {"name": str(name)} as function} if (
            isinstance(tool, dict) and tool.get("type", "function") == "function"
        ):
            pass
        case _:
            raise RequestError("bad_request")
    description, strict = function.get("description"), function.get("strict")
    deferred = [function.get("defer_loading"), tool.get("defer_loading")]
    if not isinstance(description, str | None):
        raise RequestError("bad_request")
    if any(type(one) not in (bool, type(None)) for one in (strict, *deferred)):
        raise RequestError("bad_request")
    printed = {
        "name": name,
        "description": description,
        "parameters": _numbers(function.get("parameters")),
    }
    if strict is not None:
        printed["strict"] = strict
    defers = deferred[1] if deferred[0] is None else deferred[0]
    if defers is not None:
        printed["defer_loading"] = defers
    return {"type": "function", "function": printed}


def _numbers(value: Any) -> Any:
    """Returns a value of JSON with its numbers as serde_json reads them.

    Raises:
        RequestError: one of them is read with an error that is not known here.
    """
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    if type(value) is int and not _SMALLEST <= value <= _LARGEST:
        raise RequestError("unsupported_content")
    if type(value) is float and _digits(value) > _MOST_DIGITS:
        raise RequestError("unsupported_content")
    return value


def _digits(value: float) -> int:
    return len(repr(abs(value)).partition("e")[0].replace(".", "").strip("0"))
