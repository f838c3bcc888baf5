"""Builds the question for a worker's POST /tokenize, and parses the answer.

Source: vLLM 0.10.2 to 0.32.0 (TokenizeCompletionRequest, TokenizeChatRequest, TokenizeResponse).
SGLang 0.5 has the form for texts under the same path, and none for conversations.
"""

from typing import Annotated, Any

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.dialect import Dialect
from extproc.requests.prompt import (
    ASKED,
    DEVELOPER,
    INLINE_SYSTEM,
    PARTS,
    REASONING,
    Chat,
    Prompt,
    Text,
)
from extproc.templates.conversions import with_reasoning
from kvstate.overlap import Tokens
from kvstate.undecodable import UNDECODABLE

PATH = "/tokenize"

# Longer answers are refused. A byte seldom becomes more than one token, whose id has up to ten
# digits, a comma and a space; templates add more.
_ANSWER_BYTES_PER_BYTE = 12
_TEMPLATE_BYTES = 256 * 1024
_LONGEST_ANSWER_BYTES = 16 * 1024 * 1024

# Keys of a message that parsing added, or that /tokenize does not read.
_UNSENT = ("tools", "reasoning_content")
_REASONING = frozenset(("reasoning", "reasoning_content"))

# These variables of a conversation are separate fields; the rest are template arguments.
_FIELDS = ("add_generation_prompt", "continue_final_message", "tools")


class _TokenizeAnswer(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]]
    count: int | None = None


_answer = msgspec.json.Decoder(_TokenizeAnswer)


def question(prompt: Chat | Text, model: str | None) -> bytes:
    """Returns the body that asks for a prompt's token ids; equal prompts have equal bodies.

    model: as the client wrote it; the worker may use another tokenizer for an adapter.

    Raises:
        RequestError: the answer may differ from what the engine computes.
    """
    if prompt.special_tokens_vary:
        raise RequestError("unsupported_special_tokens")
    body = _text(prompt) if isinstance(prompt, Text) else _chat(prompt)
    try:
        return msgspec.json.encode(body if model is None else {"model": model, **body})
    except UnicodeEncodeError:
        raise RequestError("not_unicode") from None


def forms_asked(prompt: Prompt) -> int:
    """Returns the forms of a prompt that a worker tokenizes, besides its own.

    vLLM's /tokenize is not its chat path: it knows no model that is rendered in code (gpt-oss), and
    changes between releases like that one. So its answers must be proved.
    """
    if not isinstance(prompt, Chat):
        return 0
    forms = ASKED
    for message in prompt.messages:
        if not _REASONING.isdisjoint(message):
            forms |= REASONING
        if message.get("role") == "developer":
            forms |= DEVELOPER
        if isinstance(message.get("content"), list):
            forms |= PARTS
    return forms


def longest_answer_bytes(asked: bytes) -> int:
    """Returns how many bytes the answer to a question may have."""
    return min(_TEMPLATE_BYTES + _ANSWER_BYTES_PER_BYTE * len(asked), _LONGEST_ANSWER_BYTES)


def answered(content: bytes) -> Tokens:
    """Returns the token ids in an answer.

    Raises:
        RequestError: the answer is invalid (tokenizer_failed).
    """
    try:
        answer = _answer.decode(content)
    except UNDECODABLE:
        raise RequestError("tokenizer_failed") from None
    if not answer.tokens or answer.count not in (None, len(answer.tokens)):
        raise RequestError("tokenizer_failed")
    return Tokens("I", answer.tokens)


def _text(prompt: Text) -> dict[str, Any]:
    return {"prompt": prompt.text, "add_special_tokens": prompt.add_special_tokens}


def _chat(prompt: Chat) -> dict[str, Any]:
    if prompt.has_media:
        raise RequestError("unsupported_media")
    # /tokenize supports neither, and would ignore them silently
    if prompt.effort:
        raise RequestError("unsupported_reasoning_effort")
    if prompt.conversion is not None and prompt.forms:
        raise RequestError("unsupported_by_engine")  # its /tokenize renders only chat completions
    if "documents" in prompt.variables:
        raise RequestError("unsupported_documents")
    if prompt.forms & INLINE_SYSTEM:
        raise RequestError("unsupported_inline_system")
    fields = {key: prompt.variables[key] for key in _FIELDS if key in prompt.variables}
    others = {key: value for key, value in prompt.variables.items() if key not in _FIELDS}
    body = {
        "messages": _messages(prompt),
        "add_special_tokens": prompt.add_special_tokens,
        **fields,
    }
    return {**body, "chat_template_kwargs": others} if others else body


def _messages(prompt: Chat) -> list[dict[str, Any]]:
    """Returns a chat's messages, as they were sent to a Rust front end: it reads both APIs alike,
    and some of its renderers write the arguments of calls as they are.
    """
    if prompt.dialect is not None and prompt.dialect.is_rust:
        return list(prompt.sent)
    return [_message(message, prompt.dialect) for message in prompt.messages]


def _message(message: dict[str, Any], dialect: Dialect | None) -> dict[str, Any]:
    """Returns a message as clients send it: without what parsing added, call arguments as text.

    Its reasoning is under the key that /tokenize reads: unlike chat completions, that renames none.
    """
    if not _REASONING.isdisjoint(message):
        if dialect is None:
            raise RequestError("unsupported_reasoning")
        message = with_reasoning(message, dialect.reasoning)
    sent = {key: value for key, value in message.items() if key not in _UNSENT}
    if "tool_calls" in message:
        sent["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return sent


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = msgspec.json.encode(function["arguments"]).decode()
    return {**call, "function": {**function, "arguments": arguments}}
