"""Parses a request: finds its API, and reads the fields that determine its prompt.

This folder knows what clients send: the APIs of vLLM, SGLang and TensorRT-LLM, a module each, and
what their releases read differently (`dialect`, `sglang_rules`). It turns a body into an
`InferenceRequest`, whose prompts are a conversation, a text or token ids (`prompt`), and it changes
bodies where a feature has to (`edits`). It knows no template, no tokenizer and no worker, and it is
pure: bytes in, values or a `RequestError` out.

The rule: a prompt is keyed only if every checked release of the engine turns it into the same token
ids, or its dialect says how it differs. Other requests get a reason and are placed by load;
docs/internals/reasons.md lists them. What is not understood is never skipped. Bodies are hostile:
their size, nesting and numbers are bounded before anything is made of them (`costly_json`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from extproc.base.errors import RequestError
from extproc.config.schema import Model
from extproc.requests import (
    chat_request,
    completion_request,
    grpc_request,
    messages_request,
    responses_request,
)
from extproc.requests.costly_json import MAX_COMMAS, MAX_ID_COMMAS, refuse_costly
from extproc.requests.dialect import DialectFor, agreed
from extproc.requests.odd_json import OddBody, decoded, ends_in_utf8, restored
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
from extproc.requests.request_class import RequestClass
from extproc.requests.tenant_salt import Tenant
from extproc.requests.trusted_headers import NO_TRUSTED_HEADERS, TrustedHeaders
from kvstate.undecodable import UNDECODABLE

__all__ = [
    "CHAT_PATH",
    "COMPLETIONS_PATH",
    "MAX_BYTES",
    "MAX_LEARNED",
    "MAX_MESSAGES",
    "MAX_PROMPTS",
    "NOT_INFERENCE",
    "PATHS",
    "UNKEYED",
    "UNKEYED_PATHS",
    "UNREAD",
    "Chat",
    "Head",
    "InferenceRequest",
    "LearnedPaths",
    "Models",
    "Prompt",
    "RoutingRequest",
    "ServedModel",
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

# APIs whose bodies releases turn into conversations differently.
_BY_RELEASE: dict[str, Callable[[bytes, DialectFor], InferenceRequest]] = {
    CHAT_PATH: chat_request.parse,
    responses_request.PATH: responses_request.parse,
    messages_request.PATH: messages_request.parse,
}

_PARSERS: dict[str, Callable[[bytes], InferenceRequest]] = {
    COMPLETIONS_PATH: completion_request.parse_completion,
    completion_request.EMBEDDINGS_PATH: completion_request.parse_embeddings,
    completion_request.GENERATE_PATH: completion_request.parse_generate,
    completion_request.TOKENS_PATH: completion_request.parse_tokens,
}


# Paths of vLLM and SGLang on which a model computes, but whose prompts are not keyed. Sources: the
# routes in `vllm/entrypoints` of vLLM 0.32.0 and in `srt/entrypoints` of SGLang 0.5.23.
UNKEYED_PATHS = frozenset(
    {
        "/api/chat",
        "/api/generate",
        "/classify",
        "/cohere/v2/chat",
        "/encode",
        "/generative_scoring",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions/batch",
        "/v1/classify",
        "/v1/decisions",
        "/v1/rerank",
        "/v1/score",
        "/v1/systemone",
        "/v2/embed",
        "/v2/rerank",
        "/vertex_generate",
    }
)

# SGLang serves these for PUT, too.
_PUT_PATHS = frozenset({"/classify", "/encode", "/generate", "/v1/rerank"})

# Other POSTs that engines answer without computing a prompt, though some report tokens. What is
# behind the last of them names a response that exists already.
_WITHOUT_MODEL = frozenset(
    {
        "/cohere/v2/chat/render",
        "/detokenize",
        "/tokenize",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/detokenize",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/responses/render",
        "/v1/tokenize",
    }
)
_RESPONSES = "/v1/responses/"

# The reason for requests that call no model: a probe, a list of models, another service's route.
NOT_INFERENCE = "not_inference"

# The reason for those that call one by an API whose prompts are not keyed.
UNKEYED = "unkeyed_api"

# Paths that are learned, and their length.
MAX_LEARNED = 64
MAX_LEARNED_CHARACTERS = 128


# The paths of HTTP APIs whose prompts can be keyed.
PATHS = (*_BY_RELEASE, *_PARSERS)
_KEYED = frozenset(PATHS)

# Why the body of an inference request was not read.
UNREAD = frozenset({"body_too_large", "body_not_buffered"})


class Head(msgspec.Struct, frozen=True, gc=False):
    """The parts of a request's headers on which its treatment depends."""

    # The HTTP method.
    method: str
    # The path, as `path_of` returns it.
    path: str
    # The body's length in bytes, None if it is not known.
    content_length: int | None
    # The policy named in its header, None without one.
    policy: str | None = None
    # The endpoints (ip:port) that the proxy allows, None for all.
    subset: frozenset[str] | None = None
    # The client's session named in its header, "" without one.
    session: str = ""
    # The value of the header by which requests are steered together, "" without one.
    conversation: str = ""
    # The id that the request has of its own, "" without one.
    request_id: str = ""
    # The header of this name, "" without one.
    traceparent: str = ""
    # The encoding of the body, "" if it is not compressed.
    encoding: str = ""


NO_HEAD = Head("", "", None)
NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})


class RoutingRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to place.

    body: None if it is placed without its body; reason then says why. With both, the body is there
    only to be cleaned of the router's fields. proxy_finds_model: whether
    the proxy's routes choose a cluster by the model, and find the model themselves if the router
    names none. wants_endpoint: whether the proxy needs an endpoint even for a request that calls no
    model. of_class: its class, None without classes. tenant: whose it is, None if nobody asks.
    is_unread: whether it has a body that would have been changed, and was not read. whose: the
    client that waits for itself alone: the tenant, or an address; None where nobody asks. named:
    the values of the headers that features read, where one of them asks for these.
    policy_headers: the values of the headers that policies read, by the keys that name them; empty
    where none is configured.
    """

    head: Head
    body: bytes | None
    reason: str = ""
    proxy_finds_model: bool = False
    wants_endpoint: bool = False
    of_class: RequestClass | None = None
    tenant: Tenant | None = None
    is_unread: bool = False
    whose: bytes | None = None
    named: TrustedHeaders = NO_TRUSTED_HEADERS
    policy_headers: Mapping[str, bytes] = NO_HEADERS


# A request that says nothing of which worker it wants.
PLAIN_REQUEST = RoutingRequest(NO_HEAD, None)


class _AnyBody(msgspec.Struct):
    model: str | None = None


class _AnyApi(msgspec.Struct):
    messages: msgspec.Raw = NULL
    system: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL


# Reasons for bodies that no engine would accept either.
ENGINES_REFUSE = frozenset({"bad_json", "bad_request", "empty_prompt"})

# Reasons for bodies that engines may read which use another decoder.
MAY_BE_ODD = frozenset({"bad_json", "bad_request"})

_any_body = msgspec.json.Decoder(_AnyBody)
_any_api = msgspec.json.Decoder(_AnyApi)

# Targets whose paths are kept: clients use few, and each has at most a kilobyte.
_KNOWN_TARGETS = 128

# What is before the path in an absolute target, as clients send it to a proxy.
_AUTHORITY = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")

_MODEL = re.compile(rb'"model"\s*:')
_TEXT = re.compile(rb'\s*("[^"\\]*(?:\\.[^"\\]*)*")')
_ID_PATHS = frozenset(
    (
        COMPLETIONS_PATH,
        completion_request.EMBEDDINGS_PATH,
        completion_request.GENERATE_PATH,
        completion_request.TOKENS_PATH,
    )
)


@lru_cache(_KNOWN_TARGETS)
def path_of(target: str) -> str:
    """Returns the path of a request target, as the engines' server (uvicorn) understands it.

    It leaves out scheme, host, query string and fragment, and decodes percent-encoded letters once.
    Without that, a request that an engine answers could look like none that calls a model.
    """
    if not target.startswith("/"):
        target = _AUTHORITY.sub("", target)
    path = target.partition("?")[0].partition("#")[0]
    if "%" in path:
        path = unquote(path)
    return path.removesuffix("/")


def is_inference(method: str, path: str) -> bool:
    """Returns whether the body of a request carries a prompt that can be keyed.

    Method and path are both "" if the proxy sends neither, as with NGINX Gateway Fabric: then the
    body decides.
    """
    if not method and not path:
        return True
    return _may_call(method, path) and (path in _KEYED or path in grpc_request.PATHS)


def _may_call(method: str, path: str) -> bool:
    return method == "POST" or (method == "PUT" and path in _PUT_PATHS)


def may_compute(method: str, path: str) -> bool:
    """Returns whether a model may compute a prompt for a request: by an API that is known, or not.

    Method and path are both "" if the proxy sends neither.
    """
    if not method and not path:
        return True
    if method not in ("POST", "PUT") or path in _WITHOUT_MODEL:
        return False
    of_response = path.removeprefix(_RESPONSES)
    # without an id, a server that merges slashes may take it for the path that computes
    return of_response == path or of_response[:1] in ("", "/")


def has_empty_segment(path: str) -> bool:
    """Returns whether a part of a path is empty, which some servers leave out."""
    return "//" in path or path.endswith("/")


def why_unkeyed(method: str, path: str) -> str:
    """Returns why the body of a request is not needed, by its method and path; "" if it is."""
    if is_inference(method, path):
        return ""
    return UNKEYED if _may_call(method, path) and path in UNKEYED_PATHS else NOT_INFERENCE


class LearnedPaths:
    """Paths of other POSTs that were answered with usage: a model computes there, too.

    An engine's newer releases have APIs that this one does not know. At most MAX_LEARNED are
    remembered, the latest.
    """

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}

    def may_learn(self, method: str, path: str) -> bool:
        """Returns whether the answer to a request could show that it calls a model."""
        if method != "POST" or path in _WITHOUT_MODEL or path.startswith(_RESPONSES):
            return False
        return len(path) <= MAX_LEARNED_CHARACTERS and path not in self._paths

    def learn(self, path: str) -> None:
        """Notes that an answer to a POST of this path reported usage."""
        self._paths.pop(path, None)
        self._paths[path] = None
        if len(self._paths) > MAX_LEARNED:
            del self._paths[next(iter(self._paths))]

    def why_unkeyed(self, method: str, path: str) -> str:
        """Returns what `why_unkeyed` does, but counts learned paths as a model's."""
        if method == "POST" and path in _KEYED:  # the usual case
            return ""
        why = why_unkeyed(method, path)
        is_learned = why == NOT_INFERENCE and method == "POST" and path in self._paths
        return UNKEYED if is_learned else why


def model_of(body: bytes) -> str | None:
    """Returns the model that a body names, None if it names none, whatever its prompt.

    Only both ends of a long body are searched.
    """
    if len(body) <= 2 * _ENDS_BYTES:
        return _named(body) or _named_oddly(body)
    ends = body[:_ENDS_BYTES], body[-_ENDS_BYTES:]
    return _named_in(ends, _named) or _named_in(ends_in_utf8(*ends), _named_oddly)


def _named_in(ends: tuple[bytes, bytes], named: Callable[[bytes], str | None]) -> str | None:
    start, end = ends
    return _named_last(end, named) or _named_first(start, named)


def _named(body: bytes) -> str | None:
    try:
        return _any_body.decode(body).model
    except UNDECODABLE:
        return None


def _named_oddly(body: bytes) -> str | None:
    """Returns the model in a body that msgspec refuses and engines may read."""
    try:
        name = decoded(body).get("model")
    except RequestError:
        return None
    return name if isinstance(name, str) else None


def _named_last(end: bytes, named: Callable[[bytes], str | None]) -> str | None:
    """Returns the model named at the end of a body, None if there is none.

    From one of its own fields on, the rest of a body becomes an object if a brace is put before it;
    from a field of an inner object on, it does not. In a text, a field's quotes would be escaped.
    """
    places = [found.start() for found in _MODEL.finditer(end)][-_MAX_PLACES:]
    names = (named(b"{" + end[place:]) for place in reversed(places))
    return next(filter(None, names), None)


def _named_first(start: bytes, named: Callable[[bytes], str | None]) -> str | None:
    """Returns the model named at the beginning of a body, found in the same way."""
    for found in [*_MODEL.finditer(start)][:_MAX_PLACES]:
        before, behind = start[: found.start()], start[found.end() :]
        text = _TEXT.match(behind)
        name = named(before + b'"model":' + text[1] + b"}") if text else None
        if name:
            return name
    return None


def parse(path: str, body: bytes, dialect_for: DialectFor = agreed) -> InferenceRequest:
    """Parses the body of a request for which `is_inference` holds.

    dialect_for: returns the dialect of the engines that serve a model, by its name in the body.

    Raises:
        RequestError: a strict decoder refuses the body (MAY_BE_ODD), an engine would refuse it too
            (empty_prompt), it is too large (too_many_*), or its prompt cannot be known exactly
            (unsupported_*, odd_json, and unkeyed_api if the proxy sent no path and the body does
            not show the API).
    """
    if len(body) > MAX_BYTES:
        raise RequestError("too_many_bytes")
    if path in grpc_request.PATHS:
        return grpc_request.parse(path, body)
    refuse_costly(body, MAX_ID_COMMAS if path in _ID_PATHS or not path else MAX_COMMAS)
    try:
        path = path or _path_by_fields(body)
        by_release = _BY_RELEASE.get(path)
        request = _PARSERS[path](body) if by_release is None else by_release(body, dialect_for)
        return restored(request) if type(body) is OddBody else request
    except msgspec.ValidationError:
        raise RequestError("bad_request") from None
    except UNDECODABLE:
        raise RequestError("bad_json") from None


def _path_by_fields(body: bytes) -> str:
    """Returns the path of the API that the fields of a body identify.

    A conversation without `system` means the same in chat completions and in Anthropic's messages.
    """
    fields = _any_api.decode(body)
    if is_given(fields.messages):
        return messages_request.PATH if is_given(fields.system) else CHAT_PATH
    if is_given(fields.prompt):
        return COMPLETIONS_PATH
    raise RequestError("unkeyed_api")


class ServedModel(NamedTuple):
    """The meaning of a model name in a request: a configured model, and its adapter if any."""

    model: str
    lora: str | None


class Models:
    """The names that requests may use for the configured models."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._default = models[0].name
        self._only = len(models) == 1
        self._names: dict[str, ServedModel] = {}
        for model in models:
            for name in (model.name, *model.aliases):
                self._names[name] = ServedModel(model.name, None)
            for adapter in model.lora:
                self._names[adapter] = ServedModel(model.name, adapter)

    @property
    def default(self) -> str:
        """The first model: its workers get requests that name no known model."""
        return self._default

    def find(self, name: str | None) -> ServedModel | None:
        """Returns the model and adapter for a request's model name, None if it is unknown.

        A request without a name means the only model, if there is only one."""
        if not name:
            return ServedModel(self._default, None) if self._only else None
        return self._names.get(name)
