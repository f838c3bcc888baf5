"""What a request asks of a model: parsed from path and body, only as far as the prompt needs.

Sources: OpenAI's chat completions and completions, with vLLM's extensions (cache_salt, token id
prompts, add_generation_prompt, continue_final_message, add_special_tokens, chat_template_kwargs).
"""

from array import array
from typing import Any, NamedTuple

import msgspec

from extproc.errors import RequestError
from kvstate.events import Tokens

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

# More than this is not keyed: parsing holds the event loop, and tokenizing must not hold a thread
# for long after the deadline has passed.
MAX_BYTES = 4 * 1024 * 1024
MAX_PROMPTS = 64
MAX_MESSAGES = 8192

# In chat_template_kwargs these replace what the request itself says, in some engines only.
_RESERVED_VARIABLES = frozenset(
    ("messages", "conversation", "tools", "chat_template", "tokenize", "truncation", "max_length")
)


class Chat(NamedTuple):
    """A conversation, as the chat template sees it.

    has_reasoning_effort: whether the request sets it; engines hand it to templates each in its way.
    """

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    add_special_tokens: bool = False
    has_reasoning_effort: bool = False


class Text(NamedTuple):
    """A prompt of text."""

    text: str
    add_special_tokens: bool = True


# A prompt before it is tokens: a conversation, a text, or token ids already.
Prompt = Chat | Text | Tokens


class InferenceRequest(NamedTuple):
    """A request whose prompt can be keyed.

    model: as the client wrote it; None if it did not.
    """

    model: str | None
    prompts: list[Prompt]
    cache_salt: str | None = None


class _ChatBody(msgspec.Struct):
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
    cache_salt: str | None = None


class _CompletionBody(msgspec.Struct):
    prompt: str | list[str | int | list[int]]
    model: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None
    cache_salt: str | None = None


class _AnyBody(msgspec.Struct):
    model: str | None = None


_chat_body = msgspec.json.Decoder(_ChatBody)
_completion_body = msgspec.json.Decoder(_CompletionBody)
_any_body = msgspec.json.Decoder(_AnyBody)


def path_of(target: str) -> str:
    """The path of a request target, without query string."""
    return target.partition("?")[0].removesuffix("/")


def is_inference(method: str, path: str) -> bool:
    """Whether the body of this request carries a prompt that we can key."""
    return method == "POST" and path in (CHAT_PATH, COMPLETIONS_PATH)


def model_of(body: bytes) -> str | None:
    """The model that a body names, also where its prompt cannot be keyed."""
    try:
        return _any_body.decode(body).model
    except (msgspec.DecodeError, RecursionError):
        return None


def parse(path: str, body: bytes) -> InferenceRequest:
    """Parses the body of a request for which `is_inference` holds.

    Raises:
        RequestError: the body is not one that an engine would accept either (bad_json,
            bad_request), or one whose prompt we do not claim to know (unsupported_*).
    """
    if len(body) > MAX_BYTES:
        raise RequestError("too_many_bytes")
    try:
        if path == CHAT_PATH:
            return _chat(_chat_body.decode(body))
        return _completion(_completion_body.decode(body))
    except msgspec.ValidationError:
        raise RequestError("bad_request") from None
    except (msgspec.DecodeError, RecursionError):
        raise RequestError("bad_json") from None


def _chat(body: _ChatBody) -> InferenceRequest:
    if not body.messages:
        raise RequestError("empty_prompt")
    if len(body.messages) > MAX_MESSAGES:
        raise RequestError("too_many_messages")
    if body.chat_template is not None:
        raise RequestError("unsupported_client_template")
    if body.truncate_prompt_tokens is not None:
        raise RequestError("unsupported_truncation")
    if body.add_generation_prompt and body.continue_final_message:
        raise RequestError("bad_request")
    given = body.chat_template_kwargs or {}
    if not _RESERVED_VARIABLES.isdisjoint(given):
        raise RequestError("unsupported_template_kwargs")
    variables: dict[str, Any] = {
        **given,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    if body.tools is not None:
        if body.tool_choice not in (None, "auto", "required"):
            raise RequestError("unsupported_tool_choice")  # some engines then leave tools out
        variables["tools"] = _tools(body.tools)
    if body.documents is not None:
        variables["documents"] = body.documents
    messages = [_message(message) for message in body.messages]
    chat = Chat(messages, variables, body.add_special_tokens, body.reasoning_effort is not None)
    return InferenceRequest(body.model, [chat], body.cache_salt)


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as vLLM hands them to templates, which print them as JSON: in this order of keys.

    What else a tool may have is written differently from one version to the next.
    """
    if not tools:
        raise RequestError("unsupported_tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    match tool:
        case {"function": {"name": str(), "description": str(), "parameters": dict()} as function}:
            keys = ("name", "description", "parameters")
            is_plain = len(function) == len(keys) and tool.get("type", "function") == "function"
            if is_plain and tool.keys() <= {"type", "function"}:
                return {"type": "function", "function": {key: function[key] for key in keys}}
    raise RequestError("unsupported_tools")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with what vLLM leaves of it; templates then see nothing else either."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("bad_request")
    kept = {"role": role, "content": _content(message.get("content"))}
    if isinstance(message.get("name"), str):
        kept["name"] = message["name"]
    if role == "tool" and "tool_call_id" in message:
        kept["tool_call_id"] = message["tool_call_id"]
    if role == "developer" and message.get("tools") is not None:
        raise RequestError("unsupported_tools")
    if role != "assistant":
        return kept
    for key in ("reasoning", "reasoning_content"):
        if message.get(key) is not None:
            kept[key] = message[key]
    calls = message.get("tool_calls")
    return _with_parsed_arguments(kept, calls) if calls else kept


def _content(content: object) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return [_part(part) for part in content]
    raise RequestError("bad_request")


def _part(part: object) -> dict[str, str]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
    raise RequestError("unsupported_content")


def _with_parsed_arguments(message: dict[str, Any], calls: object) -> dict[str, Any]:
    """Tool call arguments as the object that templates expect; clients send them as JSON text."""
    if not isinstance(calls, list):
        raise RequestError("bad_request")
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError("bad_request")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            raise RequestError("bad_request") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _completion(body: _CompletionBody) -> InferenceRequest:
    if not body.prompt:
        raise RequestError("empty_prompt")
    if body.truncate_prompt_tokens is not None:
        raise RequestError("unsupported_truncation")
    if body.suffix:
        raise RequestError("unsupported_suffix")
    if body.prompt_embeds is not None:
        raise RequestError("unsupported_embeddings")
    prompts = _prompts(body.prompt, add_special_tokens=body.add_special_tokens)
    return InferenceRequest(body.model, prompts, body.cache_salt)


def _prompts(raw: str | list[str | int | list[int]], *, add_special_tokens: bool) -> list[Prompt]:
    if isinstance(raw, str):
        return [Text(raw, add_special_tokens)]
    if isinstance(raw[0], int):
        return [_token_ids(raw)]
    if len(raw) > MAX_PROMPTS:
        raise RequestError("too_many_prompts")
    return [
        Text(item, add_special_tokens) if isinstance(item, str) else _token_ids(item)
        for item in raw
    ]


def _token_ids(ids: object) -> Tokens:
    if not isinstance(ids, list) or not ids:
        raise RequestError("empty_prompt")
    try:
        return array("I", ids)
    except (TypeError, OverflowError):
        raise RequestError("bad_request") from None
