"""What a request asks of a model, whichever API it came by."""

from typing import Any, NamedTuple

from kvstate.events import Tokens

# Conversations and lists beyond these are not keyed: every message costs template time, and every
# prompt a walk through the index.
MAX_MESSAGES = 8192
MAX_PROMPTS = 64


class Chat(NamedTuple):
    """A conversation, as the chat template sees it.

    messages: content is a text, None, or a list of parts: {"type": "text", "text": ...}, with what
        else the client put there, and for media {"type": "image"}, "audio" or "video".
    has_reasoning_effort: whether the request sets it; engines hand it to templates each in its way.
    has_media: a part is no text. How many tokens it becomes only the engine's processor knows, so
        only what stands before it can be keyed.
    special_tokens_vary: releases of the engine disagree on add_special_tokens here; the ids are
        certain only where the tokenizer adds no special token by itself.
    """

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    add_special_tokens: bool = False
    has_reasoning_effort: bool = False
    has_media: bool = False
    special_tokens_vary: bool = False


class Text(NamedTuple):
    """A prompt of text.

    special_tokens_vary: as in Chat.
    """

    text: str
    add_special_tokens: bool = True
    special_tokens_vary: bool = False


# A prompt before it is tokens: a conversation, a text, or token ids already.
Prompt = Chat | Text | Tokens


class InferenceRequest(NamedTuple):
    """A request whose prompt can be keyed.

    model: as the client wrote it; None if it did not.
    keep_last_tokens: of every prompt the engine computes only so many tokens, its last ones.
    reads_cache: False where the engine computes the whole prompt anew, since the request wants the
        probabilities of its tokens; it stores the blocks all the same.
    answers: how many are asked for, to each prompt (`n`).
    """

    model: str | None
    prompts: list[Prompt]
    cache_salt: str | None = None
    keep_last_tokens: int | None = None
    reads_cache: bool = True
    answers: int = 1

    def kept(self, tokens: Tokens) -> Tokens:
        """What the engine computes of a prompt's tokens."""
        return tokens if self.keep_last_tokens is None else tokens[-self.keep_last_tokens :]
