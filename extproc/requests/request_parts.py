"""Pieces of requests that several APIs share."""

from array import array

import msgspec

from extproc.errors import RequestError
from extproc.requests.prompt import MAX_PROMPTS, Prompt, Text
from kvstate.events import Tokens

# Where only this much is to be known of a field, whether it is there, nothing is made of it.
NULL = msgspec.Raw(b"null")
_EMPTY = (b"null", b"false", b"0", b'""', b"[]", b"{}")

# A prompt as completions and embeddings take it: a text, token ids, or a list of either.
RawPrompts = str | list[str | int | list[int]]


def prompts_of(
    raw: RawPrompts, *, add_special_tokens: bool = True, special_tokens_vary: bool = False
) -> list[Prompt]:
    """The prompts of a request that holds one or several.

    Raises:
        RequestError: there is none, one is empty, or there are too many.
    """
    if not raw:
        raise RequestError("empty_prompt")
    if isinstance(raw, str):
        return [Text(raw, add_special_tokens, special_tokens_vary)]
    if isinstance(raw[0], int):
        return [token_ids(raw)]
    if len(raw) > MAX_PROMPTS:
        raise RequestError("too_many_prompts")
    return [
        Text(item, add_special_tokens, special_tokens_vary)
        if isinstance(item, str)
        else token_ids(item)
        for item in raw
    ]


def is_given(field: msgspec.Raw) -> bool:
    """Whether a field is there, and not null."""
    return bytes(memoryview(field)[:5]) != b"null"


def is_filled(field: msgspec.Raw) -> bool:
    """Whether a field is there, and neither empty nor false nor 0."""
    return bytes(memoryview(field)[:6]) not in _EMPTY


def token_ids(ids: object) -> Tokens:
    """Token ids as they came, in a buffer.

    Raises:
        RequestError: there is none, or one is no token id.
    """
    if not isinstance(ids, list) or not ids:
        raise RequestError("empty_prompt")
    try:
        return array("I", ids)
    except (TypeError, OverflowError):
        raise RequestError("bad_request") from None


def answers_in(n: object) -> int:
    """How many answers a request's `n` asks for; 1 where it is none that an engine takes."""
    return n if isinstance(n, int) and not isinstance(n, bool) and n > 1 else 1


def kept_tokens(truncate_prompt_tokens: int | None, side: object = None) -> int | None:
    """How many tokens vLLM keeps of a prompt, None: all.

    Its default side is left, so the last ones; it took the side into requests only lately. With -1
    it keeps as many as the model takes, which only the engine knows.

    Raises:
        RequestError: releases differ, or only the engine knows.
    """
    if truncate_prompt_tokens is None:
        return None
    if truncate_prompt_tokens < 1 or side not in (None, "left"):
        raise RequestError("unsupported_truncation")
    return truncate_prompt_tokens
