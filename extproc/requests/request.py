"""Parses a request: finds its API, and reads the fields that determine its prompt.

Each API has its own module. A prompt is keyed only if every checked release of the engine turns it
into the same token ids; other requests get a reason and are placed by load. docs/requests.md lists
both.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from extproc.config.schema import Model
from extproc.errors import RequestError
from extproc.requests import (
    chat_request,
    completion_request,
    grpc_request,
    messages_request,
    responses_request,
)
from extproc.requests import completion_request as embeddings_request
from extproc.requests import completion_request as generate_request
from extproc.requests.costly_json import MAX_COMMAS, MAX_ID_COMMAS, refuse_costly
from extproc.requests.prompt import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    NULL,
    Chat,
    InferenceRequest,
    Prompt,
    Text,
    is_given,
)

__all__ = [
    "CHAT_PATH",
    "COMPLETIONS_PATH",
    "MAX_BYTES",
    "MAX_MESSAGES",
    "MAX_PROMPTS",
    "NOT_INFERENCE",
    "PATHS",
    "UNKEYED_PATHS",
    "UNREAD",
    "Ask",
    "Chat",
    "Head",
    "InferenceRequest",
    "Models",
    "Prompt",
    "Served",
    "Text",
    "is_inference",
    "model_of",
    "parse",
    "path_of",
    "why_unkeyed",
]

CHAT_PATH = chat_request.PATH
COMPLETIONS_PATH = completion_request.PATH

# Larger bodies are not keyed: tokenizing must not occupy a thread long after the deadline.
MAX_BYTES = 4 * 1024 * 1024

# The model is searched for at both ends of a long body, where clients write it, in at most this
# many places of each.
_ENDS_BYTES = 65_536
_MAX_PLACES = 8

_PARSERS: dict[str, Callable[[bytes], InferenceRequest]] = {
    CHAT_PATH: chat_request.parse,
    COMPLETIONS_PATH: completion_request.parse,
    responses_request.PATH: responses_request.parse,
    messages_request.PATH: messages_request.parse,
    embeddings_request.EMBEDDINGS_PATH: embeddings_request.parse_embeddings,
    generate_request.GENERATE_PATH: generate_request.parse_generate,
    generate_request.TOKENS_PATH: generate_request.parse_tokens,
}


# Paths of vLLM and SGLang on which a model computes, but whose prompts are not keyed.
UNKEYED_PATHS = frozenset(
    {
        "/classify",
        "/encode",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/rerank",
        "/v1/score",
        "/v2/rerank",
    }
)

# The reason for requests that call no model: a probe, a list of models, another service's route.
NOT_INFERENCE = "not_inference"


# The paths of HTTP APIs whose prompts can be keyed.
PATHS = tuple(_PARSERS)

# Why the body of an inference request was not read.
UNREAD = frozenset({"body_too_large", "body_not_buffered"})


class Head(msgspec.Struct, frozen=True, gc=False):
    """The parts of a request's headers on which its treatment depends.

    content_length: in bytes, None if unknown. policy: the policy named in its header, None without
    one. subset: the endpoints (ip:port) that the proxy allows, None for all. session: the client's
    session named in its header, "" without one. conversation: the value of the header by which
    requests are steered together, "" without one.
    """

    method: str
    path: str
    content_length: int | None
    policy: str | None = None
    subset: frozenset[str] | None = None
    session: str = ""
    conversation: str = ""


class Ask(msgspec.Struct, frozen=True, gc=False):
    """A request to place.

    body: None if it is placed without its body; reason then says why. proxy_finds_model: whether
    the proxy's routes choose a cluster by the model, and find the model themselves if the router
    names none. wants_endpoint: whether the proxy needs an endpoint even for a request that calls no
    model.
    """

    head: Head
    body: bytes | None
    reason: str = ""
    proxy_finds_model: bool = False
    wants_endpoint: bool = False


class _AnyBody(msgspec.Struct):
    model: str | None = None


class _AnyApi(msgspec.Struct):
    messages: msgspec.Raw = NULL
    system: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL


# Reasons for bodies that no engine would accept either.
ENGINES_REFUSE = frozenset({"bad_json", "bad_request", "empty_prompt"})

_any_body = msgspec.json.Decoder(_AnyBody)
_any_api = msgspec.json.Decoder(_AnyApi)

_MODEL = re.compile(rb'"model"\s*:')
_TEXT = re.compile(rb'\s*("[^"\\]*(?:\\.[^"\\]*)*")')
_ID_PATHS = frozenset(
    (
        COMPLETIONS_PATH,
        embeddings_request.EMBEDDINGS_PATH,
        generate_request.GENERATE_PATH,
        generate_request.TOKENS_PATH,
    )
)


def path_of(target: str) -> str:
    """Returns the path of a request target, without its query string."""
    return target.partition("?")[0].removesuffix("/")


def is_inference(method: str, path: str) -> bool:
    """Returns whether the body of a request carries a prompt that can be keyed.

    Method and path are both "" if the proxy sends neither, as with NGINX Gateway Fabric: then the
    body decides.
    """
    if not method and not path:
        return True
    return method == "POST" and (path in _PARSERS or path in grpc_request.PATHS)


def why_unkeyed(method: str, path: str) -> str:
    """Returns why the body of a request is not needed, by its method and path; "" if it is."""
    if is_inference(method, path):
        return ""
    return "unkeyed_api" if method == "POST" and path in UNKEYED_PATHS else NOT_INFERENCE


def model_of(body: bytes) -> str | None:
    """Returns the model that a body names, None if it names none, whatever its prompt.

    Only both ends of a long body are searched.
    """
    if len(body) <= 2 * _ENDS_BYTES:
        return _named(body)
    return _named_last(body[-_ENDS_BYTES:]) or _named_first(body[:_ENDS_BYTES])


def _named(body: bytes) -> str | None:
    try:
        return _any_body.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _named_last(end: bytes) -> str | None:
    """Returns the model named at the end of a body, None if there is none.

    From one of its own fields on, the rest of a body becomes an object if a brace is put before it;
    from a field of an inner object on, it does not. In a text, a field's quotes would be escaped.
    """
    places = [found.start() for found in _MODEL.finditer(end)][-_MAX_PLACES:]
    names = (_named(b"{" + end[place:]) for place in reversed(places))
    return next(filter(None, names), None)


def _named_first(start: bytes) -> str | None:
    """Returns the model named at the beginning of a body, found in the same way."""
    for found in [*_MODEL.finditer(start)][:_MAX_PLACES]:
        before, behind = start[: found.start()], start[found.end() :]
        text = _TEXT.match(behind)
        name = _named(before + b'"model":' + text[1] + b"}") if text else None
        if name:
            return name
    return None


def parse(path: str, body: bytes) -> InferenceRequest:
    """Parses the body of a request for which `is_inference` holds.

    Raises:
        RequestError: an engine would refuse the body too (bad_json, bad_request, empty_prompt), it
            is too large (too_many_*), or its prompt cannot be known exactly (unsupported_*, and
            unkeyed_api if the proxy sent no path and the body does not show the API).
    """
    if len(body) > MAX_BYTES:
        raise RequestError("too_many_bytes")
    if path in grpc_request.PATHS:
        return grpc_request.parse(path, body)
    refuse_costly(body, MAX_ID_COMMAS if path in _ID_PATHS or not path else MAX_COMMAS)
    try:
        return _PARSERS[path or _path_told_by(body)](body)
    except msgspec.ValidationError:
        raise RequestError("bad_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("bad_json") from None


def _path_told_by(body: bytes) -> str:
    """Returns the path of the API that the fields of a body identify.

    A conversation without `system` means the same in chat completions and in Anthropic's messages.
    """
    fields = _any_api.decode(body)
    if is_given(fields.messages):
        return messages_request.PATH if is_given(fields.system) else CHAT_PATH
    if is_given(fields.prompt):
        return COMPLETIONS_PATH
    raise RequestError("unkeyed_api")


class Served(NamedTuple):
    """The meaning of a model name in a request: a configured model, and its adapter if any."""

    model: str
    lora: str | None


class Models:
    """The names that requests may use for the configured models."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._default = models[0].name
        self._only = len(models) == 1
        self._names: dict[str, Served] = {}
        for model in models:
            for name in (model.name, *model.aliases):
                self._names[name] = Served(model.name, None)
            for adapter in model.lora:
                self._names[adapter] = Served(model.name, adapter)

    @property
    def default(self) -> str:
        """Returns the first model: its workers get requests that name no known model."""
        return self._default

    def find(self, name: str | None) -> Served | None:
        """Returns the model and adapter for a request's model name, None if it is unknown.

        A request without a name means the only model, if there is only one."""
        if not name:
            return Served(self._default, None) if self._only else None
        return self._names.get(name)
