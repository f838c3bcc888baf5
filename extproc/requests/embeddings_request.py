"""OpenAI's embeddings (POST /v1/embeddings): texts, token ids, or with vLLM one conversation.

Source: vLLM 0.10.2 to 0.32.0. For conversations its defaults differ from chat completions': no
generation prompt. Pooling cuts prompts on the other side than generation does, and not in every
release, so a truncated one is not keyed.
"""

from typing import Any

import msgspec

from extproc.errors import RequestError
from extproc.requests.chat_request import Options, conversation
from extproc.requests.prompt import InferenceRequest
from extproc.requests.request_parts import NULL, is_given, prompts_of

PATH = "/v1/embeddings"


class _Body(msgspec.Struct):
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


_body = msgspec.json.Decoder(_Body)


def parse(content: bytes) -> InferenceRequest:
    """Parses a body.

    Raises:
        RequestError: it is not keyed, and why.
        msgspec.DecodeError: it is no such body.
    """
    body = _body.decode(content)
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
        Options(
            chat_template=body.chat_template,
            template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=bool(body.add_special_tokens),
        ),
    )
    return InferenceRequest(body.model, [chat], body.cache_salt)
