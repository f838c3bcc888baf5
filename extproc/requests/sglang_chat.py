"""Chat completions as SGLang reads them, which messages and responses become first.

Source: SGLang 0.5.9 to 0.5.23, srt/entrypoints/openai/protocol.py (the fields of messages, calls
and tools, and their order), serving_chat.py, and srt/function_call/utils.py (types in schemas).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.costly_json import refuse_costly
from extproc.requests.dialect import Dialect
from extproc.requests.prompt import (
    CONVERTED,
    MAX_MESSAGES,
    NULL,
    Chat,
    Conversion,
    InferenceRequest,
    answers_in,
    is_filled,
    is_given,
    token_ids,
)
from extproc.requests.sglang_media import MediaFields, arguments_of, media_part, media_parts_of
from extproc.requests.sglang_rules import SglangRules, Switches
from kvstate.undecodable import UNDECODABLE

Messages = list[dict[str, Any]]

EFFORTS = frozenset(("none", "minimal", "low", "medium", "high", "xhigh", "max"))

_ROLES = frozenset(("system", "user", "assistant", "tool", "function", "developer"))
_TEXT_KEYS = ("tool_call_id", "name", "phase", "reasoning_content")

# Standard types of JSON Schema; newer releases replace some others before templates see them.
_TYPES = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))

# The keys of a function, in the order in which they are declared.
_FUNCTION_KEYS = ("description", "name", "parameters", "strict", "defer_loading")

_LARGEST, _SMALLEST = 2**64 - 1, -(2**63)

_PLAIN_KEYS = ("role", "content")

# Arguments of templates that mean something else to the libraries between.
_RESERVED = frozenset(
    (
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "truncation",
        "max_length",
        "padding",
        "return_tensors",
        "return_dict",
        "tokenizer_kwargs",
        "return_assistant_tokens_mask",
    )
)


_NO_FIELDS = MediaFields()


class _SglangChatBody(MediaFields, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    reasoning_effort: Any = None
    reasoning: Any = None
    thinking: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Any = None
    input_ids: msgspec.Raw = NULL
    model: str | None = None
    lora_path: msgspec.Raw = NULL
    session_params: msgspec.Raw = NULL
    extra_key: msgspec.Raw = NULL
    cache_salt: str | None = None
    n: Any = None


_body = msgspec.json.Decoder(_SglangChatBody)


class TemplateSettings(msgspec.Struct, frozen=True, gc=False):
    """What a request says besides its messages.

    tools: as templates get them, None for none. effort: "" for none; sets_switches: whether it sets
    the arguments that switch thinking. merged, thinking, thinking_config, checks_calls: as in
    `Conversion`. media: by which the engine reads the media.
    """

    tools: Messages | None = None
    effort: str = ""
    sets_switches: bool = True
    keywords: Mapping[str, Any] | None = None
    merged: Messages | None = None
    thinking: bool | None = None
    thinking_config: Any = None
    checks_calls: bool = True
    media: MediaFields = _NO_FIELDS


def parse(content: bytes, rules: SglangRules, dialect: Dialect) -> InferenceRequest:
    """Parses the body of a chat completion for SGLang.

    dialect: the one that has these rules.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no chat completion.
    """
    body = _body.decode(content)
    if is_given(body.extra_key):
        raise RequestError("unsupported_extra_key")
    if is_given(body.session_params):
        raise RequestError("unsupported_session")
    if is_given(body.lora_path):
        raise RequestError("unsupported_lora")
    continued = None
    if body.continue_final_message and body.messages and _is_models(body.messages[-1]):
        continued = _continued(body.messages[-1])
    answers = answers_in(body.n)
    if is_filled(body.input_ids):
        ids = token_ids(body.input_ids)
        return InferenceRequest(body.model, [ids], body.cache_salt, answers=answers)
    settings = TemplateSettings(
        tools=printed_tools(body.tools, body.tool_choice, rules),
        effort=effort_in(_effort(body)),
        keywords=body.chat_template_kwargs,
        thinking_config=body.thinking,
        media=body,
    )
    messages = body.messages if continued is None else body.messages[:-1]
    chat = conversation(messages, settings, rules, dialect)
    if continued is not None:
        chat = _going_on(chat, continued)
    return InferenceRequest(body.model, [chat], body.cache_salt, answers=answers)


def _continued(message: dict[str, Any]) -> str:
    """Returns the text of the model's last turn; nothing else of that turn counts."""
    content = message.get("content")
    if not isinstance(content, str | None):
        raise RequestError("unsupported_continuation")  # the template decides what it is
    return content or ""


def _going_on(chat: Chat, continued: str) -> Chat:
    """Returns a conversation whose last turn the model goes on with.

    Source: SGLang 0.5.9 to 0.5.23, _append_assistant_prefix_to_prompt_ids.
    """
    if chat.has_media:
        raise RequestError("unsupported_continuation")
    conversion = msgspec.structs.replace(chat.conversion or Conversion(), continued=continued)
    return msgspec.structs.replace(
        chat, forms=chat.forms | CONVERTED, roles=None, conversion=conversion
    )


def _is_models(message: dict[str, Any]) -> bool:
    role = message.get("role")
    return isinstance(role, str) and role.lower() == "assistant"


def _effort(body: _SglangChatBody) -> object:
    if body.reasoning is not None:
        raise RequestError("unsupported_reasoning_effort")  # its meaning changes between releases
    return body.reasoning_effort


def effort_in(effort: object) -> str:
    """Returns the effort that a request asks for, "" for none.

    Raises:
        RequestError: it is none that is known here; some releases accept numbers.
    """
    if effort is None:
        return ""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise RequestError("unsupported_reasoning_effort")
    return effort


def conversation(
    messages: Messages, settings: TemplateSettings, rules: SglangRules, dialect: Dialect
) -> Chat:
    """Returns a conversation as the chat template gets it.

    Raises:
        RequestError: it cannot be keyed; the error says why.
    """
    if not messages:
        raise RequestError("empty_prompt")
    if len(messages) > MAX_MESSAGES:
        raise RequestError("too_many_messages")
    merged = None if settings.merged is None else turns_of(settings.merged)
    variables, is_set = _variables(settings, rules)
    is_plain = not is_set and merged is None and settings.thinking is None
    is_alike = is_plain and all(map(_is_plain, messages)) and messages[-1]["role"] == "user"
    turns = messages if is_alike else turns_of(messages)
    media = () if is_alike else media_parts_of(messages)
    return Chat(
        turns,
        variables,
        has_media=bool(media),
        dialect=dialect,
        forms=0 if is_alike else CONVERTED,
        media=media,
        processor_arguments=arguments_of(settings.media, media) if media else {},
        conversion=Conversion(
            merged,
            settings.thinking,
            settings.effort,
            thinking_config=settings.thinking_config,
            checks_calls=settings.checks_calls,
        ),
    )


def _is_plain(message: dict[str, Any]) -> bool:
    """Returns whether every engine passes a message on unchanged."""
    if tuple(message) != _PLAIN_KEYS or type(message["content"]) is not str:
        return False
    return message["role"] in ("system", "user", "assistant")


def _variables(settings: TemplateSettings, rules: SglangRules) -> tuple[dict[str, Any], bool]:
    """Returns what the template gets besides the messages, and whether a request sets any of it."""
    given = dict(settings.keywords or {})
    if not _RESERVED.isdisjoint(given):
        raise RequestError("unsupported_template_kwargs")
    effort = settings.effort
    if "reasoning_effort" in given:
        effort = effort_in(given.pop("reasoning_effort")) or effort
    variables: dict[str, Any] = {"add_generation_prompt": True}
    if effort:
        variables["reasoning_effort"] = effort
    if settings.effort and settings.sets_switches and _are_set(rules.switches, settings.effort):
        is_on = settings.effort != "none"
        given.setdefault("thinking", is_on)
        given.setdefault("enable_thinking", is_on)
    variables |= given
    if settings.tools is not None:
        variables["tools"] = settings.tools
    return variables, len(variables) > 1


def _are_set(switches: Switches, effort: str) -> bool:
    return switches is Switches.ALWAYS or (switches is Switches.OFF and effort == "none")


def turns_of(messages: Messages) -> Messages:
    """Returns messages with the fields that templates get, in their order.

    Raises:
        RequestError: one is refused by the engine, or cannot be keyed.
    """
    refuse_costly(b"\n".join(_arguments(messages)))
    return [_turn(message) for message in messages]


def _arguments(messages: Messages) -> list[bytes]:
    """Returns the arguments of tool calls, which are JSON text within JSON."""
    found = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            match call:
                case {"function": {"arguments": str(arguments)}}:
                    found.append(arguments.encode("utf-8", "surrogatepass"))
    return found


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("bad_request")
    if role == "user":
        if message.get("content") is None:
            raise RequestError("bad_request")
        return {"role": role, "content": _content(message["content"])}
    role = role.lower()
    if role not in _ROLES:
        raise RequestError("bad_request")
    if message.get("tools") is not None:
        raise RequestError("unsupported_tools")
    if message.get("prefix") is not None:
        raise RequestError("unsupported_continuation")
    return {"role": role, "content": _content(message.get("content")), **_fields(message)}


def _fields(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the other fields of a turn, in the order in which the engine has them."""
    found = {key: message[key] for key in _TEXT_KEYS if message.get(key) is not None}
    if not all(isinstance(value, str) for value in found.values()):
        raise RequestError("bad_request")
    calls = message.get("tool_calls")
    if calls is None:
        return found
    if not isinstance(calls, list):
        raise RequestError("bad_request")
    return {**found, "tool_calls": [_call(call) for call in calls]}


def _content(content: object) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("bad_request")
    return [_part(part) for part in content]


def _part(part: object) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
    media = media_part(part)
    if media is None:
        raise RequestError("unsupported_content")
    return media


def _call(call: object) -> dict[str, Any]:
    """Returns a tool call with all its fields, and its arguments as an object."""
    match call:
        case {"function": dict(function)} if isinstance(call, dict):
            pass
        case _:
            raise RequestError("bad_request")
    call_id, index = call.get("id"), call.get("index")
    is_typed = isinstance(call_id, str | None) and type(index) in (int, type(None))
    if not is_typed or call.get("type", "function") != "function":
        raise RequestError("bad_request")
    name = function.get("name")
    if not isinstance(name, str | None):
        raise RequestError("bad_request")
    return {
        "id": call_id,
        "index": index,
        "type": "function",
        "function": {"name": name, "arguments": _object(function.get("arguments"))},
    }


def _object(arguments: object) -> dict[str, Any] | None:
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except UNDECODABLE:
            raise RequestError("unsupported_tool_arguments") from None
        if not _are_narrow(arguments):
            raise RequestError("unsupported_tool_arguments")  # the engine's parser rounds them
        if arguments is None:
            raise RequestError("unsupported_tool_arguments")
    if not isinstance(arguments, dict | None):
        raise RequestError("unsupported_tool_arguments")
    return arguments


def _are_narrow(value: object) -> bool:
    """Returns whether all integers have at most 64 bits."""
    if type(value) is int:
        return _SMALLEST <= value <= _LARGEST
    if isinstance(value, dict):
        return all(map(_are_narrow, value.values()))
    return not isinstance(value, list) or all(map(_are_narrow, value))


def printed_tools(
    tools: Sequence[dict[str, Any]] | None, choice: object, rules: SglangRules
) -> Messages | None:
    """Returns the tools as the chat template gets them, None for none.

    choice: the request's tool_choice; one that names a tool leaves the others out.

    Raises:
        RequestError: the engine refuses them, or they cannot be keyed.
    """
    named = _named(choice)
    if named is None and choice not in (None, "auto", "required", "none"):
        raise RequestError("unsupported_tool_choice")
    printed = [_tool(tool, rules) for tool in tools or ()]
    if not printed and (named is not None or choice == "required"):
        raise RequestError("bad_request")
    if choice == "none":
        return None
    if named is not None:
        printed = [tool for tool in printed if tool["function"]["name"] == named]
        if not printed:
            raise RequestError("bad_request")
    return printed or None


def _named(choice: object) -> str | None:
    match choice:
        case {"function": {"name": str(name)}}:
            return name
    return None


def _tool(tool: dict[str, Any], rules: SglangRules) -> dict[str, Any]:
    kind, function, defers = tool.get("type", "function"), tool.get("function"), None
    if not isinstance(kind, str) or not isinstance(function, dict):
        raise RequestError("bad_request")
    if rules.prints_deferral:
        defers = tool.get("defer_loading")
    printed = {"type": kind, "function": _function(function, rules, defers)}
    return {**printed, "defer_loading": defers} if rules.prints_deferral else printed


def _function(function: dict[str, Any], rules: SglangRules, defers: object) -> dict[str, Any]:
    found = {key: function.get(key) for key in _FUNCTION_KEYS}
    if found["defer_loading"] is None:
        found["defer_loading"] = defers
    switches = (found["strict"], found["defer_loading"])
    is_typed = isinstance(found["name"], str) and isinstance(found["description"], str | None)
    if not is_typed or any(type(one) not in (bool, type(None)) for one in switches):
        raise RequestError("unsupported_tools")
    if not _are_standard(found["parameters"]):
        raise RequestError("unsupported_tools")
    if found["defer_loading"] is None or not rules.prints_deferral:
        del found["defer_loading"]
    if not rules.keeps_tool_order:
        return {**found, "strict": bool(found["strict"])}
    if found["strict"] is None:
        del found["strict"]
    order = [key for key in function if key in found]
    return {key: found[key] for key in (*order, *(one for one in found if one not in function))}


def _are_standard(schema: object) -> bool:
    """Returns whether every `type` in a schema is a standard one, which no release replaces."""
    if isinstance(schema, list):
        return all(map(_are_standard, schema))
    if not isinstance(schema, dict):
        return True
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else ()
    if any(isinstance(one, str) and one not in _TYPES for one in kinds):
        return False
    return all(map(_are_standard, schema.values()))
