"""OpenAI's chat completions (POST /v1/chat/completions), with vLLM's extensions.

Source: vLLM 0.10.2, 0.14.1, 0.19.1, 0.24.0 and 0.32.0: add_generation_prompt,
continue_final_message, add_special_tokens, documents, chat_template_kwargs,
truncate_prompt_tokens, cache_salt, kv_transfer_params.
"""

from typing import Any, NamedTuple

import msgspec

from extproc.errors import RequestError
from extproc.requests.chat_message import NONE, messages_of
from extproc.requests.chat_tools import tools_of
from extproc.requests.known_bodies import Known, KnownBodies, Shaped
from extproc.requests.prompt import Chat, InferenceRequest
from extproc.requests.request_parts import answers_in, kept_tokens

PATH = "/v1/chat/completions"

# What the bodies of conversations may take: some 330 of 32k tokens each.
MAX_KNOWN_BYTES = 128 * 1024 * 1024

# In chat_template_kwargs these are arguments of transformers' apply_chat_template: they replace
# what the request itself says, or change the form of the result, in some engines only.
_RESERVED_VARIABLES = frozenset(
    (
        *("messages", "conversation", "tools", "chat_template", "tokenize", "truncation"),
        *("max_length", "padding", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "sanitize_control_tokens"),
    )
)


class Options(NamedTuple):
    """What besides the messages decides how a conversation becomes a prompt.

    Field names are the request's; template_kwargs is its chat_template_kwargs. orders_calls: as in
    chat_message.messages_of.
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
_known_bodies = KnownBodies(MAX_KNOWN_BYTES)


def parse(content: bytes) -> InferenceRequest:
    """Parses a body; of a conversation's next turn, only what is new in it.

    Raises:
        RequestError: it is not keyed, and why.
        msgspec.DecodeError: it is no such body.
    """
    known = _known_bodies.find(content)
    if known is not None:
        try:
            return _parsed(content, known)
        except (RequestError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # what is wrong, the whole says
    return _parsed(content, None)


def _parsed(content: bytes, known: Known | None) -> InferenceRequest:
    if known is None:
        body, before = _body.decode(content), NONE
    else:
        body, before = _body.decode(known.text), known.shaped
        del body.messages[0]  # stands in for those before
    request, shaped = _request(body, before)
    _known_bodies.remember(content, known, shaped)
    return request


def _request(body: _Body, before: Shaped) -> tuple[InferenceRequest, Shaped]:
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
    chat = conversation(body.messages, options, before)
    shaped = (chat.messages, chat.has_media)
    if keep is not None and chat.has_media:
        raise RequestError("unsupported_truncation")
    if keep is not None and chat.add_special_tokens:
        chat = chat._replace(special_tokens_vary=True)
    # with echo the engine takes top_logprobs for prompt_logprobs, and it is 0 where it is not set
    reads_cache = body.prompt_logprobs is None and not body.echo
    answers = answers_in(body.n)
    return InferenceRequest(body.model, [chat], body.cache_salt, keep, reads_cache, answers), shaped


def conversation(messages: list[dict[str, Any]], options: Options, before: Shaped = NONE) -> Chat:
    """A conversation as the template sees it.

    before: as in chat_message.messages_of.

    Raises:
        RequestError: it is not keyed, and why.
    """
    if options.chat_template is not None:
        raise RequestError("unsupported_client_template")
    if options.add_generation_prompt and options.continue_final_message:
        raise RequestError("bad_request")
    parsed, has_media = messages_of(messages, orders_calls=options.orders_calls, before=before)
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
    if any(value is None or value == "auto" for value in given.values()):
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
