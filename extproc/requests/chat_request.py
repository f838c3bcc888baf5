"""OpenAI's chat completions (POST /v1/chat/completions), with vLLM's extensions.

Source: vLLM 0.10.2, 0.14.1, 0.19.1, 0.24.0 and 0.32.0: add_generation_prompt,
continue_final_message, add_special_tokens, documents, chat_template_kwargs,
truncate_prompt_tokens, cache_salt, kv_transfer_params.

Messages are parsed as engines pass them to the chat template.

Source: vLLM's parsing of chat messages, 0.10.2, 0.14.1, 0.19.1, 0.24.0 and 0.32.0. If these
releases differ, the message is not keyed.

Engines pass the contents of messages to templates in two forms: as text, and in parts.

Source: vLLM 0.24.0 and 0.32.0, its content formats "string" and "openai".
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import msgspec

from extproc.base.errors import RequestError
from extproc.base.template_arguments import RESERVED_ARGUMENTS
from extproc.requests import rust_chat, sglang_chat
from extproc.requests.costly_json import refuse_costly
from extproc.requests.dialect import Dialect, DialectFor, Effort, ToolFields, agreed
from extproc.requests.function_tools import printed_tools
from extproc.requests.given_ids import given_ids
from extproc.requests.known_messages import KnownMessages, memory_of
from extproc.requests.known_tools import PrintedTools, read_tools
from extproc.requests.media import MEDIA_PARTS
from extproc.requests.odd_json import object_in
from extproc.requests.prompt import (
    BILLING,
    EMPTIED,
    LEFT_OUT,
    MAX_MESSAGES,
    NO_TOOLS,
    NULL,
    TOOL_REFERENCES,
    USUAL_VARIABLES,
    Chat,
    InferenceRequest,
    MediaPart,
    answers_in,
    is_given,
    refusal_of,
    token_limit,
)
from kvstate.undecodable import UNDECODABLE

# Kinds of text parts, and the key of the text in each. Older engines refuse newer kinds
# ("output_text"), so no prompt differs.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}

# A part that names a tool, by which templates write its definition. Source: vLLM 0.24.0 to 0.33.0.
TOOL_REFERENCE = "tool_reference"

# The fields of parts that vLLM's models name, whatever the kind. They do not reach templates, but
# all others do. Source: ChatCompletionContentPartParam of vLLM 0.33.0 and of the OpenAI library.
PART_FIELDS = frozenset(
    (
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    )
)

# Those that no kind of text has.
_COMMON_FIELDS = PART_FIELDS - {"type", "text", "refusal"}

# A line that some clients change with every request; engines before 0.32 keep it.
BILLING_LINE = "x-anthropic-billing-header"

# The efforts that vLLM accepts; 0.19.1 and earlier refuse some of them.
EFFORTS = frozenset(("none", "minimal", "low", "medium", "high", "xhigh", "max"))

# A mark to find again in the rendered text; no template or client uses it.
MEDIA_MARK = "\ue000kvsteer media\ue001"

Messages = Sequence[dict[str, Any]]

_PLAIN_KEYS = ("role", "content")
_RESULT_KEYS = ("role", "content", "tool_call_id")
_PLAIN_ROLES = ("user", "assistant")  # not a set: a role may be unhashable

_SHAPES = frozenset((_PLAIN_KEYS,))
_TEXTS = frozenset((str,))
_ROLES = frozenset((*_PLAIN_ROLES, "system"))
_role, _text = itemgetter("role"), itemgetter("content")
_own_forms = attrgetter("forms")


def roles_of(messages: list[dict[str, Any]]) -> tuple[str, ...] | None:
    """Returns the roles of messages that are all plain: passed on unchanged, as in most requests.

    Returns None if one of them is not, or if there are none or too many.
    """
    if not 0 < len(messages) <= MAX_MESSAGES or not _SHAPES.issuperset(map(tuple, messages)):
        return None
    roles, contents = tuple(map(_role, messages)), list(map(_text, messages))
    if not (_TEXTS.issuperset(map(type, roles)) and _TEXTS.issuperset(map(type, contents))):
        return None
    if not _ROLES.issuperset(roles):
        return None
    if "system" in roles and any(map(_is_billed, compress(contents, map("system".__eq__, roles)))):
        return None
    return roles


def _is_billed(content: str) -> bool:
    return content.startswith(BILLING_LINE)


def messages_of(
    messages: list[dict[str, Any]],
    *,
    orders_calls: bool = True,
    calls_by_text: bool = False,
    known: "Sequence[SentMessage] | None" = None,
) -> tuple[list[dict[str, Any]], bool, int]:
    """Returns the messages as templates get them, whether a part of them is media, and their forms.

    orders_calls: whether the engine puts the keys of tool calls into its own order, in which
        templates may print them. calls_by_text: whether it refuses arguments of calls that are not
        JSON text. known: the same messages, if they were read before.

    Raises:
        RequestError: there are none, too many, or one that cannot be keyed.
    """
    if not messages:
        raise RequestError("empty_prompt")
    if len(messages) > MAX_MESSAGES:
        raise RequestError("too_many_messages")
    read = list(map(SentMessage, messages)) if known is None else known
    if all(one.is_unchanged for one in read):
        return messages, False, 0
    if calls_by_text and any(one.has_objects for one in read):
        raise RequestError("bad_request")
    refuse_costly(b"\n".join([text for one in read for text in one.arguments]))
    parsed = [one.parsed(orders_calls=orders_calls) for one in read]
    has_billing = any(has_billing_line(one) for one in parsed if one["role"] == "system")
    in_lists = [one for one in parsed if type(one["content"]) is list]
    forms = BILLING if has_billing else 0
    for of_one in set(map(_own_forms, read)):
        forms |= of_one
    return parsed, any(map(has_media, in_lists)), forms


class SentMessage:
    """A message of a chat, as it was sent and as templates get it; neither must be changed.

    is_unchanged: whether these are the same. arguments: of its tool calls, where they are JSON text
    within JSON. has_objects: whether those of a call are none. forms: its own, once it is parsed.
    """

    __slots__ = ("_parsed", "arguments", "forms", "has_objects", "is_unchanged", "sent")

    def __init__(self, sent: dict[str, Any]) -> None:
        self.sent = sent
        self.is_unchanged = _is_plain(sent) or _is_result(sent)
        self._parsed: dict[str, Any] | None = sent if self.is_unchanged else None
        self.forms = 0
        self.arguments: Sequence[bytes] = ()
        self.has_objects = False
        calls = sent.get("tool_calls")
        if isinstance(calls, list):
            self._read_arguments(calls)

    def _read_arguments(self, calls: list[Any]) -> None:
        functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
        given = [one.get("arguments") if isinstance(one, dict) else None for one in functions]
        texts = [one.encode("utf-8", "surrogatepass") for one in given if isinstance(one, str)]
        self.arguments, self.has_objects = texts, len(texts) < len(given)

    def parsed(self, *, orders_calls: bool) -> dict[str, Any]:
        """Returns the message as templates get it.

        orders_calls: as in `messages_of`; the same in all calls but those of its maker.

        Raises:
            RequestError: it cannot be keyed.
        """
        if self._parsed is None:
            self._parsed, forms = _message(self.sent, orders_calls)
            self.forms = forms | _forms_of(self.sent)
        return self._parsed


def memory_of_arguments(messages: Iterable[SentMessage]) -> int:
    """Returns how many bytes the arguments of calls take that are texts: as such, and decoded."""
    # one by one: a text that is no JSON must not hide what is in the next
    texts = [text for one in messages for text in one.arguments]
    return sum(map(len, texts)) + sum(map(memory_of, texts))


def media_parts_of(messages: Sequence[Any]) -> tuple[MediaPart, ...]:
    """Returns the media parts of messages as the client wrote them, each with its kind."""
    contents = [one.get("content") for one in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return tuple([(MEDIA_PARTS[one["type"]], one) for one in parts if one["type"] in MEDIA_PARTS])


def _is_plain(message: dict[str, Any]) -> bool:
    """Returns whether a message is passed on unchanged; in most conversations all are."""
    if tuple(message) != _PLAIN_KEYS:
        return False
    role, content = message["role"], message["content"]
    if type(content) is not str:
        return False
    return role in _PLAIN_ROLES or (role == "system" and not content.startswith(BILLING_LINE))


def _is_result(message: dict[str, Any]) -> bool:
    """Returns whether a message is a tool's text in the form in which templates get it."""
    if tuple(message) != _RESULT_KEYS:
        return False
    return message["role"] == "tool" and type(message["content"]) is str


def _message(message: dict[str, Any], orders_calls: bool) -> tuple[dict[str, Any], int]:
    """Returns a message as templates get it; also EMPTIED if arguments of a call were, else 0."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("bad_request")
    kept: dict[str, Any] = {"role": role, "content": _content(message.get("content"))}
    if message.get("content", "") is None and role not in ("assistant", "function"):
        raise RequestError("bad_request")
    if role == "developer":
        if message.get("tools") is not None:
            raise RequestError("unsupported_tools")
        kept["tools"] = None
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            kept[field] = message[field]
    if role == "tool" and "tool_call_id" in message:
        kept["tool_call_id"] = message["tool_call_id"]
    if role != "assistant":
        return kept, 0
    turn, forms = _of_turn(message, orders_calls)
    return kept | turn, forms


def _forms_of(message: dict[str, Any]) -> int:
    """Returns the forms of a message that can be keyed, besides those of its tool calls."""
    content = message.get("content")
    forms = LEFT_OUT if "task" in message else 0
    for part in content if isinstance(content, list) else ():
        forms |= _forms_of_part(part)
    return forms


def _of_turn(message: dict[str, Any], orders_calls: bool) -> tuple[dict[str, Any], int]:
    """Returns the fields that only a model's own turn has: its reasoning and its tool calls.

    Also returns EMPTIED if arguments of a call were emptied, else 0.
    """
    turn: dict[str, Any] = {}
    if message.get("reasoning") is not None:
        turn["reasoning"] = message["reasoning"]
    if message.get("reasoning_content") is not None:
        turn["reasoning_content"] = message["reasoning_content"]
    calls = message.get("tool_calls")
    if not calls:
        return turn, 0
    if not isinstance(calls, list):
        raise RequestError("bad_request")
    parsed = [*map(_call, calls)]
    turn["tool_calls"] = [_ordered(call) if orders_calls else call for call in parsed]
    is_emptied = any(call["function"]["arguments"] is _EMPTIED for call in parsed)
    return turn, EMPTIED if is_emptied else 0


def _content(content: object) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        return [_part(part) for part in content]
    raise RequestError("bad_request")


def _part(part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise RequestError("unsupported_content")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise RequestError("unsupported_content")
    if kind in MEDIA_PARTS:
        return {"type": MEDIA_PARTS[kind]}
    if kind == TOOL_REFERENCE:
        if not isinstance(part.get("name"), str):
            raise RequestError("unsupported_content")
        return {"type": TOOL_REFERENCE, "name": part["name"]}
    key = _TEXT_PARTS.get(kind)
    text = part.get(key) if key else None
    if not isinstance(text, str):
        raise RequestError("unsupported_content")
    others = {name: value for name, value in part.items() if name not in PART_FIELDS}
    return {"type": "text", "text": text, **others}


def _forms_of_part(part: object) -> int:
    """Returns the forms of a content part that can be keyed."""
    if not isinstance(part, dict):
        return LEFT_OUT  # some releases refuse a bare text
    kind = part["type"]
    if kind == TOOL_REFERENCE:
        return TOOL_REFERENCES
    # where releases know a field of a part, they leave it out; but which, they do not agree on
    is_common = kind in MEDIA_PARTS or _COMMON_FIELDS.isdisjoint(part)
    return 0 if is_common and kind != "thinking" else LEFT_OUT


def has_billing_line(message: dict[str, Any]) -> bool:
    """Returns whether a message is a system turn of which a text begins with a billing header."""
    if message["role"] != "system":
        return False
    content = message["content"]
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return any(part.get("text", "").startswith(BILLING_LINE) for part in parts)


def _call(call: object) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object: _EMPTIED if they are none."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError("bad_request")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = arguments_in(arguments)
    if not isinstance(arguments, dict):
        raise RequestError("unsupported_tool_arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_in(text: str) -> dict[str, Any]:
    """Returns the object that is in the arguments of a call, as Python's json reads it.

    If they are something else, old releases of the engine refuse them or pass them on, and newer
    ones treat them as an empty object (`Dialect.empties_arguments`): so does this.

    Raises:
        RequestError: only the engine knows (unsupported_tool_arguments, odd_json).
    """
    try:
        arguments = msgspec.json.decode(text)
    except UNDECODABLE:
        try:
            arguments = object_in(text)
        except ValueError:
            raise RequestError("unsupported_tool_arguments") from None
    return arguments if isinstance(arguments, dict) else _EMPTIED


# What is left of arguments that are no JSON object; all such calls share it.
_EMPTIED: dict[str, Any] = {}

_CALL_KEYS = frozenset(("id", "function", "type"))
_FUNCTION_KEYS = frozenset(("arguments", "name"))


def _ordered(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a call with its keys in the order of the engine's validation: known ones first."""
    function = call["function"]
    if call.keys() == _CALL_KEYS and function.keys() == _FUNCTION_KEYS:  # as most clients send them
        printed = {"arguments": function["arguments"], "name": function["name"]}
        return {"id": call["id"], "function": printed, "type": call["type"]}
    function = _first(call["function"], ("arguments", "name"))
    return _first({**call, "function": function}, ("id", "function", "type"))


def _first(values: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {**{key: values[key] for key in keys if key in values}, **values}


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without media with its content as text: its parts joined by newlines."""
    content = message.get("content")
    if isinstance(content, str):
        return message
    texts = filter(None, map(_text_in, content or ()))
    return {**message, "content": "\n".join(texts)}


def _text_in(part: dict[str, Any]) -> str:
    """Returns the text of a part that is no media; a tool that it names counts as one."""
    text: str = part["name" if part["type"] == TOOL_REFERENCE else "text"]
    return text


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its content in parts; a tool's content without media stays text.

    Parts keep the fields that they have besides their text, which newer releases pass to templates.
    """
    content = message.get("content")
    if message.get("role") == "tool" and not (has_media(message) or names_tools(message)):
        # unlike in `flat`, empty parts count
        is_text = isinstance(content, str)
        text = content if is_text else "\n".join(part["text"] for part in content or ())
        return {**message, "content": text}
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return {**message, "content": content or []}


def has_part_fields(message: dict[str, Any]) -> bool:
    """Returns whether a text part of a message has fields besides its text."""
    content = message.get("content")
    if type(content) is not list or message.get("role") == "tool":
        return False
    return any(part["type"] == "text" and len(part) > len(("type", "text")) for part in content)


def without_part_fields(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose text parts have no fields besides their text."""
    if not has_part_fields(message):
        return message
    return {**message, "content": [_bare(part) for part in message["content"]]}


def _bare(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": part["text"]} if part["type"] == "text" else part


def without_billing_line(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a system turn without the first line of a text that is a billing header.

    A text that has no other line is left out. Source: vLLM 0.32.
    """
    if not has_billing_line(message):
        return message
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return {**message, "content": [kept for part in parts for kept in _without_line(part)]}


def _without_line(part: dict[str, Any]) -> list[dict[str, Any]]:
    text = part.get("text", "")
    if not text.startswith(BILLING_LINE):
        return [part]
    rest = text.partition("\n")[2]
    return [{**part, "text": rest}] if rest else []


def has_media(message: dict[str, Any]) -> bool:
    """Returns whether a part of a message is media."""
    content = message.get("content")
    return type(content) is list and any(map(_is_media, content))


def _is_media(part: dict[str, Any]) -> bool:
    return part["type"] not in ("text", TOOL_REFERENCE)


def names_tools(message: dict[str, Any]) -> bool:
    """Returns whether a part of a message names a tool."""
    content = message.get("content")
    return type(content) is list and any(part["type"] == TOOL_REFERENCE for part in content)


def marked(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with a mark, as text, in the place of every media part."""
    if not has_media(message):
        return message
    mark = {"type": "text", "text": MEDIA_MARK}
    content = [mark if _is_media(part) else part for part in message["content"]]
    return {**message, "content": content}


def texts_before_media(messages: Messages) -> list[str]:
    """Returns the texts before the first media of the messages."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
            continue
        for part in content or ():
            if _is_media(part):
                return texts
            texts.append(_text_in(part))
    return texts


def form_of_tools(tools: Sequence[object], choice: object, *, may_be_empty: bool = False) -> int:
    """Returns NO_TOOLS if the tools must not be used, else 0.

    choice: the request's tool_choice. Templates do not get it, but with "none" engines leave the
        tools out if --exclude-tools-when-tool-choice-none is set, which it is not by default.
    may_be_empty: the engine passes an empty list on, if nothing is said about its use.

    Raises:
        RequestError: the engine's releases or settings differ in what templates get.
    """
    if choice not in (None, "auto", "required", "none") and not _names_a_tool(choice):
        raise RequestError("unsupported_tool_choice")
    if not tools and not (may_be_empty and choice in (None, "auto")):
        raise RequestError("unsupported_tools")
    return NO_TOOLS if choice == "none" else 0


def _names_a_tool(choice: object) -> bool:
    if not isinstance(choice, dict) or choice.get("type", "function") != "function":
        return False
    function = choice.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


PATH = "/v1/chat/completions"


class ChatOptions(msgspec.Struct, frozen=True, gc=False):
    """The options besides the messages that determine the prompt of a conversation.

    Fields without a comment are the request's, of the same name.
    """

    chat_template: str | None = None
    # The request's chat_template_kwargs.
    template_kwargs: dict[str, Any] | None = None
    # The tools as templates get them.
    tools: PrintedTools | None = None
    tool_choice: object = None
    # Whether `tools` may be an empty list.
    may_have_no_tools: bool = False
    response_format: object = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    # As in `messages_of`.
    orders_calls: bool = True
    # As in `messages_of`.
    calls_by_text: bool = False
    # This and what follows: as in `Chat`.
    effort: str = ""
    effort_rule: Effort | None = None
    dialect: Dialect | None = None
    forms: int = 0
    processor_arguments: Mapping[str, Any] = {}
    takes_defaults: bool = True


# Values of fields that change nothing, besides their defaults.
_NO_CHANGE = {"echo": (b"null",), "n": (b"1",)}


class _ChatBody(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str | None = None
    tools: msgspec.Raw = NULL
    tool_choice: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = False
    kv_transfer_params: msgspec.Raw = NULL
    cache_salt: str | None = None
    n: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


# The fields by which a prompt may differ, or be refused, each with its values, as JSON, that change
# nothing.
LIMITED_FIELDS: Mapping[str, tuple[bytes, ...]] = {
    field.name: (msgspec.json.encode(field.default), *_NO_CHANGE.get(field.name, ()))
    for field in msgspec.structs.fields(_ChatBody)
    if field.name not in ("model", "messages", "cache_salt")
}

_body = msgspec.json.Decoder(_ChatBody)
_sent = msgspec.json.Decoder(dict[str, Any])


def _read(written: bytes) -> SentMessage:
    return SentMessage(_sent.decode(written))


_known = KnownMessages(_read, memory_of_arguments)


def parse(content: bytes, dialect_for: DialectFor = agreed) -> InferenceRequest:
    """Parses the body of a chat completion.

    dialect_for: as in `extproc.requests.request.parse`.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no chat completion.
    """
    body = _body.decode(content)
    dialect = dialect_for(body.model)
    if dialect is not None and dialect.is_rust:
        return rust_chat.parse(content, dialect)
    if dialect is not None and dialect.sglang is not None:
        return sglang_chat.parse(content, dialect.sglang, dialect)
    if len(body.messages) > MAX_MESSAGES:
        raise RequestError("too_many_messages")
    known = _known.read(body.messages)
    messages = [one.sent for one in known]
    usual = _usual(body, messages, dialect)
    if usual is not None:
        return usual
    # with echo the engine uses top_logprobs as prompt_logprobs, and 0 if that is not set
    reads_cache = body.prompt_logprobs is None and not body.echo
    answers = answers_in(body.n)
    given = given_ids(body.kv_transfer_params, dialect, messages, echo=body.echo)
    if given is not None:
        return InferenceRequest(
            body.model, [given], body.cache_salt, reads_cache=reads_cache, answers=answers
        )
    keep = token_limit(body.truncate_prompt_tokens, body.truncation_side)
    fields = ToolFields.NAMED if dialect is None else dialect.tool_fields
    tools = read_tools(body.tools)
    printed = None
    if tools is not None:
        printed = tools.printed((PATH, fields), partial(printed_tools, fields=fields))
    options = ChatOptions(
        chat_template=body.chat_template,
        template_kwargs=body.chat_template_kwargs,
        tools=printed,
        tool_choice=body.tool_choice,
        response_format=body.response_format,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        calls_by_text=True,
        effort=effort_in(body.reasoning_effort),
        effort_rule=None if dialect is None else dialect.effort,
        dialect=dialect,
        processor_arguments=arguments_of(body.mm_processor_kwargs, body.media_io_kwargs),
    )
    chat = conversation(messages, options, known)
    if keep is not None and chat.has_media:
        raise RequestError("unsupported_truncation")
    if keep is not None:
        chat = msgspec.structs.replace(chat, is_truncated=True)
    if keep is not None and chat.add_special_tokens:
        # tokenizers spare the special tokens they add when they truncate, whatever the release
        chat = msgspec.structs.replace(chat, special_tokens_vary=True, dialect=None)
    needs_text = bool(keep or body.echo or body.continue_final_message)
    needs_text = needs_text or is_given(body.kv_transfer_params)
    salt = body.cache_salt
    return InferenceRequest(body.model, [chat], salt, keep, reads_cache, answers, needs_text)


def _usual(
    body: _ChatBody, messages: list[dict[str, Any]], dialect: Dialect | None
) -> InferenceRequest | None:
    """Returns the request of a body with plain messages and nothing else that counts, else None.

    It is the same that the general way makes of it, at a fraction of the steps.
    """
    if body != _ChatBody(body.messages, body.model):
        return None
    if dialect is not None and not dialect.is_vllms:
        return None
    roles = roles_of(messages)
    if roles is None:
        return None
    rule = None if dialect is None else dialect.effort
    chat = Chat(
        messages, USUAL_VARIABLES, effort_rule=rule, dialect=dialect, sent=messages, roles=roles
    )
    return InferenceRequest(body.model, [chat])


def conversation(
    messages: list[dict[str, Any]], options: ChatOptions, known: Sequence[SentMessage] | None = None
) -> Chat:
    """Returns a conversation as the chat template gets it.

    known: the same messages, if they were read before.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
    """
    if options.chat_template is not None:
        raise RequestError("unsupported_client_template")
    if options.add_generation_prompt and options.continue_final_message:
        raise RequestError("bad_request")
    dialect = options.dialect
    if dialect is not None and dialect.has_own_template:
        raise RequestError("unsupported_engine_arguments")
    if dialect is not None and dialect.is_foreign:
        _refuse_foreign(messages, options)
        dialect = None
    roles, parsed, has_media, forms = roles_of(messages), messages, False, 0
    if roles is None:
        parsed, has_media, forms = messages_of(
            messages,
            orders_calls=options.orders_calls,
            calls_by_text=options.calls_by_text,
            known=known,
        )
        roles = roles_of(parsed)  # with their keys in order
    variables, more = _variables(options)
    forms |= more | options.forms
    if forms and dialect is None:
        raise RequestError(refusal_of(forms))
    if forms & EMPTIED and dialect is not None and not dialect.empties_arguments:
        raise RequestError(refusal_of(EMPTIED))
    return Chat(
        parsed,
        variables,
        options.add_special_tokens,
        options.effort,
        options.effort_rule,
        has_media,
        dialect=dialect,
        forms=forms,
        media=media_parts_of(messages) if has_media else (),
        processor_arguments=options.processor_arguments if has_media else {},
        takes_defaults=options.takes_defaults,
        sent=messages,
        tool_choice=choice_in(options.tool_choice) if options.tools and options.tools.tools else "",
        response_format=options.response_format,
        roles=roles,
    )


def choice_in(choice: object) -> str:
    """Returns "required" or "none", if tools must or must not be used, else ""."""
    return choice if isinstance(choice, str) and choice in ("required", "none") else ""


def _refuse_foreign(messages: list[dict[str, Any]], options: ChatOptions) -> None:
    """Refuses what engines with conversions of their own read differently from vLLM.

    Source: SGLang 0.5.23 (srt/entrypoints/openai/serving_chat.py, anthropic/serving.py): parts are
    joined by spaces, tools are printed in another order, a last turn of the model is continued,
    an effort sets `thinking` as well.
    """
    is_alike = options.tools is None and not options.effort and all(map(_is_plain, messages))
    if not is_alike or messages[-1:] == [] or messages[-1]["role"] != "user":
        raise RequestError("unsupported_by_engine")


def arguments_of(processor: object, loading: object) -> Mapping[str, Any]:
    """Returns the arguments by which an engine reads a request's media, empty if there are none.

    Source: mm_processor_kwargs and media_io_kwargs of vLLM 0.32.0.
    """
    given = {"mm_processor_kwargs": processor, "media_io_kwargs": loading}
    return {name: value for name, value in given.items() if value}


def effort_in(effort: object) -> str:
    """Returns the effort that a request asks for, "" for none.

    Raises:
        RequestError: it is no effort.
    """
    if effort is None:
        return ""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise RequestError("bad_request")
    return effort


def _variables(options: ChatOptions) -> tuple[dict[str, Any], int]:
    """Returns what the template gets besides the messages, and its forms."""
    given = options.template_kwargs or {}
    if not RESERVED_ARGUMENTS.isdisjoint(given):
        raise RequestError("unsupported_template_kwargs")
    unset = {name for name, value in given.items() if value is None or value == "auto"}
    forms = LEFT_OUT if unset else 0
    if unset and options.effort and "enable_thinking" in unset:
        raise RequestError("unsupported_template_kwargs")  # the effort sets it, or does not
    if options.dialect is not None and not options.dialect.drops_unset:
        unset = set()
    variables: dict[str, Any] = {
        **{name: value for name, value in given.items() if name not in unset},
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
    }
    if options.tools is not None:
        tools, more = options.tools
        forms |= more | form_of_tools(
            tools, options.tool_choice, may_be_empty=options.may_have_no_tools
        )
        variables["tools"] = tools
    if options.documents is not None:
        variables["documents"] = options.documents
    return variables, forms
