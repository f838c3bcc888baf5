"""Native generation requests: SGLang's POST /generate and vLLM's POST /inference/v1/generate.

Sources: SGLang 0.5.23 (GenerateReqInput), which tokenizes texts with the tokenizer's own special
tokens; vLLM 0.32.0 (scale_out/token_in_token_out), which takes token ids only.
"""

from typing import Any

import msgspec

from extproc.errors import RequestError
from extproc.requests.prompt import InferenceRequest
from extproc.requests.request_parts import (
    NULL,
    Texts,
    answers_in,
    ids_of,
    is_filled,
    is_given,
    texts_of,
    token_ids,
)

PATH = "/generate"
TOKENS_PATH = "/inference/v1/generate"


class _Body(msgspec.Struct):
    text: Texts | None = None
    input_ids: msgspec.Raw = NULL
    input_embeds: msgspec.Raw = NULL
    image_data: msgspec.Raw = NULL
    video_data: msgspec.Raw = NULL
    audio_data: msgspec.Raw = NULL
    session_params: msgspec.Raw = NULL
    return_logprob: Any = None
    logprob_start_len: Any = None
    lora_path: Any = None
    lora_id: msgspec.Raw = NULL
    extra_key: msgspec.Raw = NULL
    cache_salt: Any = None
    sampling_params: Any = None


class _Sampling(msgspec.Struct):
    prompt_logprobs: msgspec.Raw = NULL
    n: Any = None


class _TokensBody(msgspec.Struct):
    token_ids: msgspec.Raw
    model: str | None = None
    features: msgspec.Raw = NULL
    content_parts: msgspec.Raw = NULL
    sampling_params: _Sampling | None = None
    cache_salt: str | None = None


_body = msgspec.json.Decoder(_Body)
_tokens_body = msgspec.json.Decoder(_TokensBody)


def parse(content: bytes) -> InferenceRequest:
    """Parses SGLang's body. The adapter it names takes the place of the model it cannot name.

    Raises:
        RequestError: it is not keyed, and why.
        msgspec.DecodeError: it is no such body.
    """
    body = _body.decode(content)
    if is_given(body.input_embeds):
        raise RequestError("unsupported_embeddings")
    if any(map(is_filled, (body.image_data, body.video_data, body.audio_data))):
        raise RequestError("unsupported_media")
    if is_given(body.session_params):
        raise RequestError("unsupported_session")  # what came before, the worker remembers
    if is_given(body.extra_key):
        raise RequestError("unsupported_extra_key")  # a namespace that events do not name
    if is_given(body.lora_id) or not isinstance(body.lora_path, str | None):
        raise RequestError("unsupported_lora")
    if not isinstance(body.cache_salt, str | None):
        raise RequestError("unsupported_cache_salt")
    if (body.text is not None) == is_given(body.input_ids):
        raise RequestError("bad_request")
    prompts = ids_of(body.input_ids) if body.text is None else texts_of(body.text)
    # from logprob_start_len on, the prompt's probabilities are wanted
    reads_cache = not body.return_logprob or body.logprob_start_len in (None, -1)
    options = body.sampling_params
    return InferenceRequest(
        body.lora_path,
        prompts,
        body.cache_salt,
        reads_cache=reads_cache,
        answers=answers_in(options.get("n")) if isinstance(options, dict) else 1,
    )


def parse_tokens(content: bytes) -> InferenceRequest:
    """Parses vLLM's body.

    Raises:
        RequestError: it is not keyed, and why.
        msgspec.DecodeError: it is no such body.
    """
    body = _tokens_body.decode(content)
    if is_given(body.features) or is_filled(body.content_parts):
        raise RequestError("unsupported_media")
    options = body.sampling_params or _Sampling()
    return InferenceRequest(
        body.model,
        [token_ids(body.token_ids)],
        body.cache_salt,
        reads_cache=not is_given(options.prompt_logprobs),
        answers=answers_in(options.n),
    )
