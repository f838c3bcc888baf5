"""Request bodies, typed and bounded, as far as the simulator uses them.

Fields it does not know are ignored, as sampling parameters are.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvtools.simulator.interference import Corruption, ReplayFault
from kvtools.simulator.responses import bad_request
from kvtools.simulator.tokens import ModelTokens, PromptError

MAX_PROMPTS = 128  # in one completion request; each is a separate request to the engine
MAX_COUNT = 100_000  # batches to interfere with; garbage is sent without pauses
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Positive = Annotated[int, Meta(ge=1)]
NonEmpty = Annotated[str, Meta(min_length=1)]
Choices = Annotated[int, Meta(ge=1, le=16)]
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """How to stream."""

    include_usage: bool | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The common fields of completions and chats."""

    model: str | None = None
    max_tokens: Positive | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: NonEmpty | None = None
    session_id: str | None = None
    prompt_logprobs: int | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int] | None = None
    bootstrap_room: int | list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None

    @property
    def choices(self) -> int:
        """How many answers to each prompt."""
        return self.n or 1

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Completion(Generation, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]


class ChatRequest(Generation, frozen=True, kw_only=True):
    """POST /v1/chat/completions. `tools` reach the template; see also `tool_calls`."""

    messages: Messages
    max_completion_tokens: Positive | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


class Tokenize(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


class Misbehave(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /misbehave: any of these; see the methods of `Faults` with the same names."""

    rank: Count | None = None
    drop: Count | None = None
    lose: Count | None = None
    duplicate: Count | None = None
    reorder: bool = False
    corrupt: Corruption | None = None
    garbage: Count | None = None
    hide_replay: ReplayFault | msgspec.UnsetType | None = msgspec.UNSET
    hide_events: bool | None = None
    restart: bool = False


class CachedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """POST /cache/prefix: a prompt's tokens and its namespace."""

    tokens: list[TokenId]
    salt: str | None = None
    lora: str | None = None
    rank: Count = 0


def split_prompts(prompt: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    """Returns one entry for each prompt: its text or its token ids.

    Raises:
        ValueError: these are mixed.
    """
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return [ids]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if ids or len({type(item) for item in prompts}) != 1:
        raise ValueError("prompt must be text, token ids, or a list of either")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"more than {MAX_PROMPTS} prompts in one request")
    return prompts


Tokens = list[int]


async def of_completion(tokens: ModelTokens, body: Completion) -> list[Tokens]:
    """Returns the ids of every prompt of a completion request."""
    try:
        prompts = split_prompts(body.prompt)
    except ValueError as error:
        raise bad_request(str(error), "prompt") from error
    return [await _of_prompt(tokens, prompt) for prompt in prompts]


async def of_chat(tokens: ModelTokens, body: ChatRequest | Tokenize) -> Tokens:
    """Returns the ids of a conversation: those that it brings, as in vLLM from 0.27 on."""
    if isinstance(body, ChatRequest):
        given = (body.kv_transfer_params or {}).get("prompt_token_ids")
        if given:
            return await _of_prompt(tokens, given)

    def render() -> Tokens:
        return tokens.of_chat(
            body.messages or [],
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            template_arguments=body.chat_template_kwargs,
        )

    return await _run_in_thread(render)


async def of_tokenize(tokens: ModelTokens, body: Tokenize) -> Tokens:
    """Returns the ids of the prompt or the messages, whichever was sent."""
    if body.messages is not None:
        return await of_chat(tokens, body)
    if body.prompt is None:
        raise bad_request("either prompt or messages is needed")
    return await _of_prompt(tokens, body.prompt)


async def _of_prompt(tokens: ModelTokens, prompt: str | Sequence[int]) -> Tokens:
    if isinstance(prompt, str):
        ids = await _run_in_thread(lambda: tokens.of_text(prompt))
    else:
        ids = list(prompt)
    if not ids:
        raise bad_request("The prompt has no tokens", "prompt")
    if min(ids) < 0 or max(ids) >= tokens.size:
        raise bad_request(f"Token ids must be from 0 to {tokens.size - 1}", "prompt")
    return ids


async def _run_in_thread(tokenize: Callable[[], Tokens]) -> Tokens:
    # A long prompt takes long enough to hold up every other request.
    try:
        return await asyncio.to_thread(tokenize)
    except PromptError as error:
        raise bad_request(str(error), "messages") from error
