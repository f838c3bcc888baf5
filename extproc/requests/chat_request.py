"""OpenAI's chat completions (POST /v1/chat/completions), with vLLM's extensions.

Source: vLLM 0.10.2, 0.14.1, 0.19.1, 0.24.0 and 0.32.0: add_generation_prompt,
continue_final_message, add_special_tokens, documents, chat_template_kwargs,
truncate_prompt_tokens, cache_salt, kv_transfer_params.

Messages of a conversation with what an engine leaves of them for the chat template.

Source: vLLM's parsing of chat messages, 0.10.2, 0.14.1, 0.19.1, 0.24.0 and 0.32.0. Where these
releases differ, the message is not keyed.

Tools as vLLM hands them to templates, which print them as JSON: in this order of keys.

Source: ChatCompletionToolsParam of vLLM 0.10.2 to 0.32.0. What else a tool may have is written
differently from one release to the next, and is not keyed.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from extproc.errors import RequestError
from extproc.requests.costly_json import refuse_costly
from extproc.requests.prompt import MAX_MESSAGES, Chat, InferenceRequest, answers_in, kept_tokens

# Parts that are text under another name; the text lies under the key given here. Names that came
# later ("output_text") are refused by the engines before, which is no other prompt.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

_MEDIA_PARTS = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}

# A line that some clients change with every request; engines before 0.32 leave it in place.
_BILLING_LINE = "x-anthropic-billing-header"

_PLAIN_KEYS = ("role", "content")
_PLAIN_ROLES = ("user", "assistant")  # no set: a role may be anything, hashable or not


def messages_of(
    messages: list[dict[str, Any]], *, orders_calls: bool = True
) -> tuple[list[dict[str, Any]], bool]:
    """Returns the messages as templates see them, and whether a part of them is media.

    orders_calls: whether the engine brings the keys of tool calls into its own order, in which
        templates may print them.

    Raises:
        RequestError: there is none, there are too many, or one is not understood.
    """
    if not messages:
        raise RequestError("empty_prompt")
    if len(messages) > MAX_MESSAGES:
        raise RequestError("too_many_messages")
    if all(map(_is_plain, messages)):
        return messages, False
    refuse_costly(b"\n".join(_arguments(messages)))
    parsed = [_message(message, orders_calls) for message in messages]
    return parsed, any(_has_media(message["content"]) for message in parsed)


def _arguments(messages: list[dict[str, Any]]) -> Iterator[bytes]:
    """The arguments of calls that are JSON within JSON, to be decoded once more."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            match call:
                case {"function": {"arguments": str(arguments)}}:
                    yield arguments.encode("utf-8", "surrogatepass")


def _is_plain(message: dict[str, Any]) -> bool:
    """Whether nothing of a message is left out or changed; in most conversations all are so."""
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
    """What only a model's own turn has: what it thought and what it called."""
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
        raise RequestError("unsupported_content")  # a bare text is one to old releases only
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


def _has_media(content: str | list[dict[str, Any]] | None) -> bool:
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def _call(call: object) -> dict[str, Any]:
    """A tool call with its arguments as an object.

    Clients send arguments as JSON text. What is no JSON object was an error to old releases, is
    passed on by some and an empty object to the newest.
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
    """In the order in which the engine's validation leaves the keys: its own first."""
    function = _first(call["function"], ("arguments", "name"))
    return _first({**call, "function": function}, ("id", "function", "type"))


def _first(values: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {**{key: values[key] for key in keys if key in values}, **values}


_KEYS = {"name", "description", "parameters", "strict"}


def tools_of(tools: list[dict[str, Any]], choice: object) -> list[dict[str, Any]]:
    """Returns the tools as the chat template sees them.

    choice: the request's tool_choice. Templates do not see it, but with "none" engines leave the
        tools out where --exclude-tools-when-tool-choice-none is set.

    Raises:
        RequestError: releases or settings differ.
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
    """With null for what is left out; `strict` only where it is set, as all releases print it."""
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

# In chat_template_kwargs these are arguments of transformers' apply_chat_template: they replace
# what the request itself says, or change the form of the result, in some engines only.
_RESERVED_VARIABLES = frozenset(
    (
        *("messages", "conversation", "tools", "chat_template", "tokenize", "truncation"),
        *("max_length", "padding", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "sanitize_control_tokens"),
    )
)


class Options(msgspec.Struct, frozen=True, gc=False):
    """The options that, besides the messages, decide how a conversation becomes a prompt.

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
        raise RequestError("unsupported_kv_transfer")  # they take the prompt's place
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
    # with echo the engine takes top_logprobs for prompt_logprobs, and it is 0 where it is not set
    reads_cache = body.prompt_logprobs is None and not body.echo
    answers = answers_in(body.n)
    return InferenceRequest(body.model, [chat], body.cache_salt, keep, reads_cache, answers)


def conversation(messages: list[dict[str, Any]], options: Options) -> Chat:
    """Returns a conversation as the chat template sees it.

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
