"""Chat completions as SGLang reads them, which messages and responses become first.

Its request models drop every field that they do not name, wherever it stands: what clients add
changes no prompt. What they name is read here as they read it; what they refuse is not keyed.

Source: SGLang 0.5.9 to 0.5.23, srt/entrypoints/openai/protocol.py (the fields of messages, parts,
calls and tools, and their order) and serving_chat.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.costly_json import refuse_costly
from extproc.requests.dialect import Dialect
from extproc.requests.lax_values import flag, integer, text
from extproc.requests.prompt import (
    CONVERTED,
    MAX_MESSAGES,
    NULL,
    ROLES,
    Chat,
    Conversion,
    InferenceRequest,
    TokenIds,
    answers_in,
    is_filled,
    is_given,
    token_ids,
)
from extproc.requests.sglang_fields import as_read
from extproc.requests.sglang_media import (
    TOOL_REFERENCE,
    MediaFields,
    arguments_of,
    media_part,
    media_parts_of,
)
from extproc.requests.sglang_rules import SglangRules, Switches
from extproc.requests.sglang_schema import with_standard_types
from kvstate.undecodable import UNDECODABLE

Messages = list[dict[str, Any]]
NO_MESSAGES: Messages = []

EFFORTS = frozenset(("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"))

# The most that an effort is that a request gives as a number.
_MOST_EFFORT = 0.99

_ROLES = frozenset(
    (
        *("system", "assistant", "tool", "function", "developer"),
        *("latest_reminder", "root"),
    )
)

# Roles whose tools count with those of the request.
_INSTRUCTING = frozenset(("root", "system", "developer"))

_PHASES = (None, "commentary", "final_answer")

# The keys of a function, in the order in which they are declared.
_FUNCTION_KEYS = ("description", "name", "parameters", "strict", "defer_loading")

_PLAIN_KEYS = ("role", "content")

# The roles that the engine's own conversation templates know; they refuse all others (0.5.23,
# generate_chat_conv in srt/parser/conversation.py).
_PLAIN_ROLES = frozenset(("system", "user", "assistant"))

# Arguments of a template's function that the engine sets itself: given twice, they are an error.
_SET = frozenset(
    (
        *("conversation", "conversations", "messages", "tools", "chat_template"),
        *("add_generation_prompt", "tokenize", "return_dict"),
    )
)

# Those that transformers takes for itself, and of which nothing comes of without tokens; with the
# last two, it refuses what the engine asks for.
_TAKEN = ("padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs")
_REFUSING = ("continue_final_message", "return_assistant_tokens_mask")

# Words by which a request says that the model is to think.
_YES = frozenset(("1", "true", "yes", "y", "on"))


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
    """What a request says besides its messages."""

    # The tools as templates get them, None for none.
    tools: Messages | None = None
    # The effort, "" for none.
    effort: str | float = ""
    # Whether the effort sets the arguments that switch thinking.
    sets_switches: bool = True
    # Whether thinking is asked for besides.
    is_enabled: bool = False
    # The request's own arguments for the template, None for none.
    keywords: Mapping[str, Any] | None = None
    # This and the next three: as in `Conversion`.
    merged: Messages | None = None
    thinking: bool | None = None
    thinking_config: Any = None
    checks_calls: bool = True
    # The fields by which the engine reads the media.
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
        ids = TokenIds(token_ids(body.input_ids))
        return InferenceRequest(body.model, [ids], body.cache_salt, answers=answers)
    settings = TemplateSettings(
        tools=printed_tools(body.tools, body.tool_choice, rules, _tools_of(body.messages)),
        effort=_effort(body, rules),
        is_enabled=_is_enabled(body.reasoning),
        keywords=body.chat_template_kwargs,
        thinking_config=body.thinking,
        media=body,
    )
    messages = body.messages if continued is None else body.messages[:-1]
    chat = conversation(messages, settings, rules, dialect)
    if continued is not None:
        chat = _going_on(chat, continued)
    return InferenceRequest(
        body.model,
        [chat],
        body.cache_salt,
        answers=answers,
        needs_text=continued is not None,
    )


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


def _effort(body: _SglangChatBody, rules: SglangRules) -> str | float:
    """Returns the effort that a request asks for, "" for none; it may be a number."""
    effort = body.reasoning_effort
    if isinstance(body.reasoning, dict):
        if rules.switches is not Switches.ALWAYS:
            raise RequestError("unsupported_reasoning_effort")  # its meaning changes between them
        own = body.reasoning.get("effort")
        own = body.reasoning.get("reasoning_effort") if own is None else own
        effort = effort if own is None else own
    if effort is None or (isinstance(effort, str) and effort in EFFORTS):
        return effort or ""
    if isinstance(effort, bool) or not isinstance(effort, str | int | float):
        raise RequestError("bad_request")
    try:
        number = float(effort)
    except ValueError:
        raise RequestError("bad_request") from None
    if not 0 <= number <= _MOST_EFFORT:
        raise RequestError("bad_request")
    return number


def _is_enabled(reasoning: object) -> bool:
    """Returns whether a request switches thinking on, whatever its effort."""
    if not isinstance(reasoning, dict):
        return False
    said = reasoning.get("enabled")
    said = reasoning.get("enable") if said is None else said
    return said.strip().lower() in _YES if isinstance(said, str) else bool(said)


def effort_in(effort: object) -> str:
    """Returns the effort that a request asks for by name, "" for none.

    Raises:
        RequestError: the engine refuses it.
    """
    if effort is None:
        return ""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise RequestError("bad_request")
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
    merged = None if settings.merged is None else turns_of(settings.merged, rules)
    variables, is_set = _variables(settings, rules)
    is_plain = not is_set and merged is None and settings.thinking is None
    is_alike = is_plain and all(map(_is_plain, messages)) and messages[-1]["role"] == "user"
    turns = messages if is_alike else turns_of(messages, rules)
    media = () if is_alike else media_parts_of(messages)
    return Chat(
        turns,
        variables,
        has_media=bool(media),
        dialect=dialect,
        forms=0 if is_alike else CONVERTED | _form_of_roles(turns),
        media=media,
        processor_arguments=arguments_of(settings.media, media) if media else {},
        conversion=Conversion(
            merged,
            settings.thinking,
            str(settings.effort),
            thinking_config=settings.thinking_config,
            checks_calls=settings.checks_calls,
        ),
    )


def _form_of_roles(turns: Messages) -> int:
    return 0 if _PLAIN_ROLES.issuperset(turn["role"] for turn in turns) else ROLES


def _is_plain(message: dict[str, Any]) -> bool:
    """Returns whether every engine passes a message on unchanged."""
    if tuple(message) != _PLAIN_KEYS or type(message["content"]) is not str:
        return False
    return message["role"] in _PLAIN_ROLES


def _variables(settings: TemplateSettings, rules: SglangRules) -> tuple[dict[str, Any], bool]:
    """Returns what the template gets besides the messages, and whether a request sets any of it."""
    given: dict[str, Any] = dict(as_read(settings.keywords or {}))
    if not _SET.isdisjoint(given) or any(given.pop(one, None) for one in _REFUSING):
        raise RequestError("bad_request")
    for one in _TAKEN:
        given.pop(one, None)
    effort = settings.effort
    own = given.pop("reasoning_effort", None)
    variables: dict[str, Any] = {"add_generation_prompt": True}
    if own is not None or effort != "":
        variables["reasoning_effort"] = effort if own is None else own
    is_switched = effort != "" and settings.sets_switches and _are_set(rules.switches, effort)
    if is_switched or settings.is_enabled:
        is_on = effort != "none"
        given.setdefault("thinking", is_on)
        given.setdefault("enable_thinking", is_on)
    variables |= given
    if settings.tools is not None:
        variables["tools"] = settings.tools
    return variables, len(variables) > 1


def _are_set(switches: Switches, effort: str | float) -> bool:
    return switches is Switches.ALWAYS or (switches is Switches.OFF and effort == "none")


def turns_of(messages: Messages, rules: SglangRules) -> Messages:
    """Returns messages with the fields that templates get, in their order.

    Raises:
        RequestError: one is refused by the engine, or cannot be keyed.
    """
    refuse_costly(b"\n".join(_arguments(messages)))
    return [_turn(message, rules) for message in messages]


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


def _turn(message: dict[str, Any], rules: SglangRules) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("bad_request")
    if role == "user":
        if message.get("content") is None:
            raise RequestError("bad_request")
        return {"role": role, "content": _content(message["content"], role)}
    role = role.lower()
    if role not in _ROLES:
        raise RequestError("bad_request")
    content = _content(message.get("content"), role)
    fields = _fields({**message, "role": role}, rules)
    given = {key: value for key, value in fields.items() if value is not None}
    return {"role": role, "content": content, **given}


def _fields(message: Mapping[str, Any], rules: SglangRules) -> dict[str, Any]:
    """Returns the other fields of a turn, in the order in which the engine has them."""
    phase, prefix = message.get("phase"), flag(message.get("prefix"))
    if rules.keeps_phases and phase not in _PHASES:
        raise RequestError("bad_request")
    return {
        "tool_call_id": text(message.get("tool_call_id")),
        "name": text(message.get("name")),
        "phase": phase if rules.keeps_phases else None,
        "reasoning_content": text(message.get("reasoning_content")),
        "tool_calls": _calls(message),
        "tools": _own_tools(message, rules),
        "prefix": prefix if rules.keeps_prefixes else None,
    }


def _own_tools(message: Mapping[str, Any], rules: SglangRules) -> Messages | None:
    """Returns the tools that a message itself brings, which few templates write."""
    tools = message.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise RequestError("bad_request")
    is_checked = message["role"] in _INSTRUCTING
    return [_tool(tool, rules, replaces_types=is_checked) for tool in tools]


def _tools_of(messages: Messages) -> Messages:
    """Returns the tools that messages bring and that count with those of the request."""
    found: Messages = []
    for message in messages:
        tools = message.get("tools")
        is_counted = str(message.get("role")).lower() in _INSTRUCTING
        if is_counted and isinstance(tools, list):
            found += [tool for tool in tools if isinstance(tool, dict)]
    return found


def _content(content: object, role: str) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("bad_request")
    return [kept for part in content if (kept := _part(part, role)) is not None]


def _part(part: object, role: str) -> dict[str, Any] | None:
    """Returns a part as templates get it; None for what the model thought, which they do not."""
    match part:
        case {"type": "text", "text": str(written)}:
            return {"type": "text", "text": written}
        case {"type": "tool_reference", "name": str(name)}:
            return {"type": TOOL_REFERENCE, "name": name}
        case {"type": "thinking" | "reasoning"} if isinstance(part, dict) and role == "assistant":
            thoughts = [text(part.get(key)) for key in ("thinking", "text")]
            if thoughts.count(None) == 1:
                return None
    media = media_part(part)
    if media is None:
        raise RequestError("bad_request")
    return media


def _calls(message: Mapping[str, Any]) -> Messages | None:
    calls = message.get("tool_calls")
    if calls is None:
        return None
    if not isinstance(calls, list):
        raise RequestError("bad_request")
    return [_call(call, is_read=message["role"] == "assistant") for call in calls]


def _call(call: object, *, is_read: bool) -> dict[str, Any]:
    """Returns a tool call with all its fields.

    is_read: whether its arguments become an object.
    """
    match call:
        case {"function": dict(function)} if isinstance(call, dict):
            pass
        case _:
            raise RequestError("bad_request")
    if call.get("type", "function") != "function":
        raise RequestError("bad_request")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object(arguments) if is_read else arguments
    elif not isinstance(arguments, dict | None):
        raise RequestError("bad_request")
    return {
        "id": text(call.get("id")),
        "index": integer(call.get("index")),
        "type": "function",
        "function": {"name": text(function.get("name")), "arguments": as_read(arguments)},
    }


def _object(arguments: str) -> dict[str, Any]:
    """Returns the object that the arguments of a call are; the engine refuses all others."""
    try:
        read = msgspec.json.decode(arguments)
    except UNDECODABLE:
        raise RequestError("bad_request") from None
    if not isinstance(read, dict):
        raise RequestError("bad_request")
    return read


def printed_tools(
    tools: Sequence[dict[str, Any]] | None,
    choice: object,
    rules: SglangRules,
    others: Messages = NO_MESSAGES,
    *,
    replaces_types: bool = True,
) -> Messages | None:
    """Returns the tools as the chat template gets them, None for none.

    choice: the request's tool_choice; one that names a tool leaves the others out. others: tools
    that its messages bring. replaces_types: in the schemas of parameters.

    Raises:
        RequestError: the engine refuses them.
    """
    named = _named(choice)
    if named is None and choice not in (None, "auto", "required", "none"):
        raise RequestError("bad_request")
    printed = [_tool(tool, rules, replaces_types=replaces_types) for tool in tools or ()]
    if not printed and not others and (named is not None or choice == "required"):
        raise RequestError("bad_request")
    if choice == "none":
        return None
    if named is not None:
        chosen = [tool for tool in printed if tool["function"]["name"] == named]
        if not chosen and named not in map(_name_of, others):
            raise RequestError("bad_request")
        printed = chosen
    return printed or None


def _named(choice: object) -> str | None:
    match choice:
        case {"type": str(kind)} if kind != "function":
            return None
        case {"function": {"name": str(name)}}:
            return name
    return None


def _name_of(tool: dict[str, Any]) -> object:
    match tool:
        case {"function": {"name": name}}:
            return name
    return None


def _tool(
    tool: dict[str, Any], rules: SglangRules, *, replaces_types: bool = True
) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise RequestError("bad_request")
    kind, function, defers = tool.get("type", "function"), tool.get("function"), None
    if not isinstance(kind, str) or not isinstance(function, dict):
        raise RequestError("bad_request")
    if rules.prints_deferral:
        defers = flag(tool.get("defer_loading"))
    printed = {"type": kind, "function": _function(function, rules, defers, replaces_types)}
    return {**printed, "defer_loading": defers} if rules.prints_deferral else printed


def _function(
    function: dict[str, Any], rules: SglangRules, defers: bool | None, replaces_types: bool
) -> dict[str, Any]:
    """Returns a function with the fields that the engine's model names; it drops all others."""
    found: dict[str, Any] = {key: function.get(key) for key in _FUNCTION_KEYS}
    if text(found["name"]) is None:
        raise RequestError("bad_request")
    found["description"], found["strict"] = text(found["description"]), flag(found["strict"])
    own = flag(found["defer_loading"])
    found["defer_loading"] = defers if own is None else own
    parameters = as_read(found["parameters"])
    found["parameters"] = with_standard_types(parameters) if replaces_types else parameters
    if found["defer_loading"] is None or not rules.prints_deferral:
        del found["defer_loading"]
    if not rules.keeps_tool_order:
        return {**found, "strict": bool(found["strict"])}
    if found["strict"] is None:
        del found["strict"]
    order = [key for key in function if key in found]
    return {key: found[key] for key in (*order, *(one for one in found if one not in function))}
