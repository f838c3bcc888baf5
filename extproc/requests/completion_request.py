"""OpenAI's completions (POST /v1/completions), with vLLM's extensions.

Source: vLLM 0.10.2 to 0.32.0: prompts of token ids, add_special_tokens, truncate_prompt_tokens
(truncation_side since 0.24 at the latest), cache_salt, prompt_embeds.

OpenAI's embeddings (POST /v1/embeddings): texts, token ids, or with vLLM one conversation.

Source: vLLM 0.10.2 to 0.32.0. For conversations, unlike for chat completions, the default is no
generation prompt. Pooling truncates prompts on the opposite side from generation, and not in every
release, so a truncated prompt is not keyed.

Native generation requests: SGLang's POST /generate and vLLM's POST /inference/v1/generate.

Sources: SGLang 0.5.23 (GenerateReqInput), which tokenizes texts with the tokenizer's own special
tokens; vLLM 0.32.0 (scale_out/token_in_token_out), which takes token ids only.
"""

from typing import Any

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.chat_request import ChatOptions, conversation
from extproc.requests.prompt import (
    NULL,
    InferenceRequest,
    Texts,
    answers_in,
    ids_of,
    is_filled,
    is_given,
    prompts_of,
    texts_of,
    token_ids,
    token_limit,
)

EMBEDDINGS_PATH = "/v1/embeddings"


class _EmbeddingsBody(msgspec.Struct):
    input: msgspec.Raw = NULL
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    padding: str | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


_embeddings_body = msgspec.json.Decoder(_EmbeddingsBody)


def parse_embeddings(content: bytes) -> InferenceRequest:
    """Parses the body of an embeddings request.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no such request.
    """
    body = _embeddings_body.decode(content)
    if body.truncate_prompt_tokens is not None:
        raise RequestError("unsupported_truncation")
    if body.padding not in (None, "do_not_pad"):
        raise RequestError("unsupported_padding")
    if body.messages is None:
        add = body.add_special_tokens is not False
        if not is_given(body.input):
            raise RequestError("empty_prompt")
        prompts = prompts_of(body.input, add_special_tokens=add)
        return InferenceRequest(body.model, prompts, body.cache_salt)
    if is_given(body.input):
        raise RequestError("bad_request")
    chat = conversation(
        body.messages,
        ChatOptions(
            chat_template=body.chat_template,
            template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=bool(body.add_special_tokens),
            takes_defaults=False,
        ),
    )
    return InferenceRequest(body.model, [chat], body.cache_salt)


GENERATE_PATH = "/generate"
TOKENS_PATH = "/inference/v1/generate"


class _GenerateBody(msgspec.Struct):
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


_generate_body = msgspec.json.Decoder(_GenerateBody)
_tokens_body = msgspec.json.Decoder(_TokensBody)


def parse_generate(content: bytes) -> InferenceRequest:
    """Parses the body of SGLang's POST /generate.

    The adapter that it names is used as the model, which the API cannot name.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no such request.
    """
    body = _generate_body.decode(content)
    if is_given(body.input_embeds):
        raise RequestError("unsupported_embeddings")
    if any(map(is_filled, (body.image_data, body.video_data, body.audio_data))):
        raise RequestError("unsupported_media")
    if is_given(body.session_params):
        raise RequestError("unsupported_session")  # only the worker knows the text before it
    if is_given(body.extra_key):
        raise RequestError("unsupported_extra_key")  # a namespace that events do not carry
    if is_given(body.lora_id) or not isinstance(body.lora_path, str | None):
        raise RequestError("unsupported_lora")
    if not isinstance(body.cache_salt, str | None):
        raise RequestError("unsupported_cache_salt")
    if (body.text is not None) == is_given(body.input_ids):
        raise RequestError("bad_request")
    prompts = ids_of(body.input_ids) if body.text is None else texts_of(body.text)
    # the request wants the probabilities of the prompt from logprob_start_len on
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
    """Parses the body of vLLM's POST /inference/v1/generate.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no such request.
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


PATH = "/v1/completions"


class _CompletionBody(msgspec.Struct):
    prompt: msgspec.Raw = NULL
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


_body = msgspec.json.Decoder(_CompletionBody)


def parse_completion(content: bytes) -> InferenceRequest:
    """Parses the body of a completion.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no such request.
    """
    body = _body.decode(content)
    if body.suffix:
        raise RequestError("unsupported_suffix")
    if is_given(body.prompt_embeds):
        raise RequestError("unsupported_embeddings")
    if not is_given(body.prompt):
        raise RequestError("bad_request")
    keep = token_limit(body.truncate_prompt_tokens, body.truncation_side)
    prompts = prompts_of(
        body.prompt,
        add_special_tokens=body.add_special_tokens,
        # tokenizers spare the special tokens they add when they truncate; a slice does not
        special_tokens_vary=keep is not None and body.add_special_tokens,
    )
    wants_prompt_logprobs = body.prompt_logprobs is not None or (
        body.echo and body.logprobs is not None
    )
    reads_cache = not wants_prompt_logprobs
    answers, salt = answers_in(body.n), body.cache_salt
    needs_text = bool(keep or body.echo)
    return InferenceRequest(body.model, prompts, salt, keep, reads_cache, answers, needs_text)
