"""OpenAI's chat completions (POST /v1/chat/completions), with vLLM's extensions.

Source: vLLM 0.10.2, 0.14.1, 0.19.1, 0.24.0 and 0.32.0: add_generation_prompt,
continue_final_message, add_special_tokens, documents, chat_template_kwargs,
truncate_prompt_tokens, cache_salt, kv_transfer_params.

Messages are parsed as engines pass them to the chat template.

Source: vLLM's parsing of chat messages, 0.10.2, 0.14.1, 0.19.1, 0.24.0 and 0.32.0. If these
releases differ, the message is not keyed.

Engines pass the contents of messages to templates in two forms: as text, and in parts.

Source: vLLM 0.24.0 and 0.32.0, its content formats "string" and "openai".

The keys of tools are in the order in which vLLM passes them to templates, which print them as JSON.

Source: ChatCompletionToolsParam of vLLM 0.10.2 to 0.32.0. Tools with other fields are not keyed:
releases write these differently.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from extproc.errors import RequestError
from extproc.requests.costly_json import refuse_costly
from extproc.requests.prompt import MAX_MESSAGES, Chat, InferenceRequest, answers_in, kept_tokens

# Kinds of text parts, and the key of the text in each. Older engines refuse newer kinds
# ("output_text"), so no prompt differs.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

_MEDIA_PARTS = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}

# A line that some clients change with every request; engines before 0.32 keep it.
_BILLING_LINE = "x-anthropic-billing-header"

# A mark to find again in the rendered text; no template or client uses it.
MEDIA_MARK = "\ue000kvsteer media\ue001"

Messages = Sequence[dict[str, Any]]

_PLAIN_KEYS = ("role", "content")
_PLAIN_ROLES = ("user", "assistant")  # not a set: a role may be unhashable


def messages_of(
    messages: list[dict[str, Any]], *, orders_calls: bool = True
) -> tuple[list[dict[str, Any]], bool]:
    """Returns the messages as templates get them, and whether a part of them is media.

    orders_calls: whether the engine puts the keys of tool calls into its own order, in which
        templates may print them.

    Raises:
        RequestError: there are none, too many, or one that cannot be keyed.
    """
    if not messages:
        raise RequestError("empty_prompt")
    if len(messages) > MAX_MESSAGES:
        raise RequestError("too_many_messages")
    if all(map(_is_plain, messages)):
        return messages, False
    refuse_costly(b"\n".join(_arguments(messages)))
    parsed = [_message(message, orders_calls) for message in messages]
    return parsed, any(map(has_media, parsed))


def _arguments(messages: list[dict[str, Any]]) -> Iterator[bytes]:
    """Yields the arguments of tool calls, where they are JSON text within JSON."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            match call:
                case {"function": {"arguments": str(arguments)}}:
                    yield arguments.encode("utf-8", "surrogatepass")


def _is_plain(message: dict[str, Any]) -> bool:
    """Returns whether a message is passed on unchanged; in most conversations all are."""
    if tuple(message) != _PLAIN_KEYS:
        return False
    role, content = message["role"], message["content"]
    if type(content) is not str:
        return False
    return role in _PLAIN_ROLES or (role == "system" and not content.startswith(_BILLING_LINE))


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
    """Returns the fields that only a model's own turn has: its reasoning and its tool calls."""
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
        raise RequestError("unsupported_content")  # only old releases accept a bare text
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


def _call(call: object) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object.

    Clients send arguments as JSON text. If that is not a JSON object, old releases refuse it, some
    pass it on, and the newest treat it as an empty object.
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
    """Returns a call with its keys in the order of the engine's validation: known ones first."""
    function = _first(call["function"], ("arguments", "name"))
    return _first({**call, "function": function}, ("id", "function", "type"))


def _first(values: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {**{key: values[key] for key in keys if key in values}, **values}


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without media with its content as text: its parts joined by newlines."""
    content = message.get("content")
    if isinstance(content, str):
        return message
    texts = [part["text"] for part in content or () if part["text"]]
    return {**message, "content": "\n".join(texts)}


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its content in parts; a tool's content without media stays text.

    Raises:
        RequestError: a part has fields besides its text, which newer releases pass to templates.
    """
    content = message.get("content")
    if message.get("role") == "tool" and not has_media(message):
        # unlike in `flat`, empty parts count
        is_text = isinstance(content, str)
        text = content if is_text else "\n".join(part["text"] for part in content or ())
        return {**message, "content": text}
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    if any(len(part) > len(("type", "text")) for part in content or ()):
        raise RequestError("unsupported_content")
    return {**message, "content": content or []}


def has_media(message: dict[str, Any]) -> bool:
    """Returns whether a part of a message is media."""
    content = message.get("content")
    return type(content) is list and any(part["type"] != "text" for part in content)


def marked(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with a mark, as text, in the place of every media part."""
    if not has_media(message):
        return message
    mark = {"type": "text", "text": MEDIA_MARK}
    content = [part if part["type"] == "text" else mark for part in message["content"]]
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
            if part["type"] != "text":
                return texts
            texts.append(part["text"])
    return texts


_KEYS = {"name", "description", "parameters", "strict"}


def tools_of(tools: list[dict[str, Any]], choice: object) -> list[dict[str, Any]]:
    """Returns the tools as the chat template gets them.

    choice: the request's tool_choice. Templates do not get it, but with "none" engines leave the
        tools out if --exclude-tools-when-tool-choice-none is set.

    Raises:
        RequestError: the engine's releases or settings differ in what templates get.
    """
    if choice not in (None, "auto", "required") and not _names_a_tool(choice):
        raise RequestError("unsupported_tool_choice")
    if not tools:
        raise RequestError("unsupported_tools")
    return [_tool(tool) for tool in tools]


def _names_a_tool(choice: object) -> bool:
    match choice:
        case {"type": "function", "function": {"name": str()}}:
            return True
    return False


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    is_plain = tool.keys() <= {"type", "function"} and tool.get("type", "function") == "function"
    if not is_plain or not isinstance(function, dict):
        raise RequestError("unsupported_tools")
    return {"type": "function", "function": _function(function)}


def _function(function: dict[str, Any]) -> dict[str, Any]:
    """Returns a function with null for missing keys, but `strict` only if it is set."""
    name = function.get("name")
    description = function.get("description")
    parameters = function.get("parameters")
    is_typed = isinstance(description, str | None) and isinstance(parameters, dict | None)
    if not isinstance(name, str) or not is_typed or not function.keys() <= _KEYS:
        raise RequestError("unsupported_tools")
    printed = {"name": name, "description": description, "parameters": parameters}
    if "strict" in function:
        if not isinstance(function["strict"], bool):
            raise RequestError("unsupported_tools")
        printed["strict"] = function["strict"]
    return printed


PATH = "/v1/chat/completions"

# In chat_template_kwargs these are arguments of transformers' apply_chat_template. In some engines
# they override the request itself, or change the form of the result.
_RESERVED_VARIABLES = frozenset(
    (
        *("messages", "conversation", "tools", "chat_template", "tokenize", "truncation"),
        *("max_length", "padding", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "sanitize_control_tokens"),
    )
)


class Options(msgspec.Struct, frozen=True, gc=False):
    """The options besides the messages that determine the prompt of a conversation.

    Field names are the request's; template_kwargs is its chat_template_kwargs. orders_calls: as in
    `messages_of`.
    """

    chat_template: str | None = None
    template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: object = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    has_reasoning_effort: bool = False
    orders_calls: bool = True


class _Body(msgspec.Struct):
    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    reasoning_effort: Any = None
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
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    n: Any = None


_body = msgspec.json.Decoder(_Body)


def parse(content: bytes) -> InferenceRequest:
    """Parses the body of a chat completion.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no chat completion.
    """
    body = _body.decode(content)
    if body.kv_transfer_params and body.kv_transfer_params.get("prompt_token_ids") is not None:
        raise RequestError("unsupported_kv_transfer")  # they replace the prompt
    keep = kept_tokens(body.truncate_prompt_tokens, body.truncation_side)
    options = Options(
        chat_template=body.chat_template,
        template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
        tool_choice=body.tool_choice,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        has_reasoning_effort=body.reasoning_effort is not None,
    )
    chat = conversation(body.messages, options)
    if keep is not None and chat.has_media:
        raise RequestError("unsupported_truncation")
    if keep is not None and chat.add_special_tokens:
        chat = msgspec.structs.replace(chat, special_tokens_vary=True)
    # with echo the engine uses top_logprobs as prompt_logprobs, and 0 if that is not set
    reads_cache = body.prompt_logprobs is None and not body.echo
    answers = answers_in(body.n)
    return InferenceRequest(body.model, [chat], body.cache_salt, keep, reads_cache, answers)


def conversation(messages: list[dict[str, Any]], options: Options) -> Chat:
    """Returns a conversation as the chat template gets it.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
    """
    if options.chat_template is not None:
        raise RequestError("unsupported_client_template")
    if options.add_generation_prompt and options.continue_final_message:
        raise RequestError("bad_request")
    parsed, has_media = messages_of(messages, orders_calls=options.orders_calls)
    return Chat(
        parsed,
        _variables(options),
        options.add_special_tokens,
        options.has_reasoning_effort,
        has_media,
    )


def _variables(options: Options) -> dict[str, Any]:
    given = options.template_kwargs or {}
    if not _RESERVED_VARIABLES.isdisjoint(given):
        raise RequestError("unsupported_template_kwargs")
    if given and any(value is None or value == "auto" for value in given.values()):
        raise RequestError("unsupported_template_kwargs")  # newer releases leave these out
    variables: dict[str, Any] = {
        **given,
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
    }
    if options.tools is not None:
        variables["tools"] = tools_of(options.tools, options.tool_choice)
    if options.documents is not None:
        variables["documents"] = options.documents
    return variables
