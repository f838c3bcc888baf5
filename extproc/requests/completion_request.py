"""OpenAI's completions (POST /v1/completions), with vLLM's extensions.

Source: vLLM 0.10.2 to 0.32.0: prompts of token ids, add_special_tokens, truncate_prompt_tokens
(truncation_side since 0.24 at the latest), cache_salt, prompt_embeds.
"""

from typing import Any

import msgspec

from extproc.errors import RequestError
from extproc.requests.prompt import InferenceRequest
from extproc.requests.request_parts import (
    NULL,
    answers_in,
    is_given,
    kept_tokens,
    prompts_of,
)

PATH = "/v1/completions"


class _Body(msgspec.Struct):
    prompt: msgspec.Raw
    model: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    suffix: str | None = None
    prompt_embeds: msgspec.Raw = NULL
    prompt_logprobs: int | None = None
    echo: bool | None = False
    logprobs: int | None = None
    cache_salt: str | None = None
    n: Any = None


_body = msgspec.json.Decoder(_Body)


def parse(content: bytes) -> InferenceRequest:
    """Parses a body.

    Raises:
        RequestError: it is not keyed, and why.
        msgspec.DecodeError: it is no such body.
    """
    body = _body.decode(content)
    if body.suffix:
        raise RequestError("unsupported_suffix")
    if is_given(body.prompt_embeds):
        raise RequestError("unsupported_embeddings")
    keep = kept_tokens(body.truncate_prompt_tokens, body.truncation_side)
    prompts = prompts_of(
        body.prompt,
        add_special_tokens=body.add_special_tokens,
        # tokenizers keep the special tokens they add out of what they cut, slices do not
        special_tokens_vary=keep is not None and body.add_special_tokens,
    )
    wants_prompt_logprobs = body.prompt_logprobs is not None or (
        body.echo and body.logprobs is not None
    )
    reads_cache = not wants_prompt_logprobs
    answers = answers_in(body.n)
    return InferenceRequest(body.model, prompts, body.cache_salt, keep, reads_cache, answers)
