"""Decodes the proxy's messages: by the compiled decoder, and by protobuf what that gives up.

protobuf decides what a message says; `extproc/native/message.c` reads what it is sure of. Most
messages never come here: a session reads them as they arrive (`extproc.http2.method_decoder`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from extproc._core import Decoder
from extproc.base import headers
from extproc.http2.method_decoder import MethodDecoder
from extproc.pb.kvsteer_ext_proc_pb2 import HeaderMap, ProcessingRequest
from extproc.requests.request import Head, path_of
from extproc.routing.candidates.eligibility import subset_of
from extproc.serving.naming_headers import NO_NAMES, NamingHeaders
from extproc.serving.proxy_message import (
    NAMES,
    NO_KIND,
    REQUEST_BODY,
    REQUEST_HEADERS,
    REQUEST_TRAILERS,
    RESPONSE_BODY,
    RESPONSE_HEADERS,
    TEXT_BYTES,
    ProxyMessage,
    number_of,
)


class ProxyDecoder:
    """Decodes messages.

    names: of the headers that are read, in lower case. every: those of which every value is read.
    naming: those that name sessions and conversations; None if requests' heads are made elsewhere.
    policy_header: as in `head_of`.
    """

    def __init__(
        self,
        names: Iterable[str],
        every: Iterable[str] = (),
        naming: NamingHeaders | None = None,
        policy_header: str | None = None,
    ) -> None:
        self._names = frozenset(names)
        self._every = frozenset(every)
        head = None
        if naming is not None:
            named = tuple(naming.session), tuple(naming.conversation)
            head = (Head, policy_header or "", *named)
        self._compiled = Decoder(ProxyMessage, tuple(self._names), tuple(self._every), head)

    def reading(self, path: bytes) -> MethodDecoder:
        """Returns how a session reads the messages of calls on a path."""
        return MethodDecoder(path, self._compiled)

    def decode(self, message: bytes) -> ProxyMessage:
        """Returns what a message says.

        Raises:
            DecodeError: it is malformed.
        """
        read: ProxyMessage | None = self._compiled.decode(message)
        if read is None:
            return by_protobuf(message, self._names, self._every)
        context: Any = read.context
        if context is not None:  # its bytes so far
            read.context = _context_of(ProcessingRequest.FromString(context))
        return read


def by_protobuf(sent: bytes, names: frozenset[str], every: frozenset[str]) -> ProxyMessage:
    """Returns what a message says that the compiled decoder gives up.

    names, every: as `ProxyDecoder` takes them.

    Raises:
        DecodeError: it is malformed.
    """
    message = ProcessingRequest.FromString(sent)
    kind = NAMES.get(message.WhichOneof("request") or "", NO_KIND)
    texts: dict[str, str] = {}
    values: dict[str, list[bytes]] = {}
    body, is_last = b"", False
    if kind in (REQUEST_HEADERS, RESPONSE_HEADERS):
        is_request = kind == REQUEST_HEADERS
        part = message.request_headers if is_request else message.response_headers
        texts, is_last = _texts_of(part.headers, names), part.end_of_stream
        if every:
            values = _values_of(part.headers, every)
    elif kind in (REQUEST_BODY, RESPONSE_BODY):
        piece = message.request_body if kind == REQUEST_BODY else message.response_body
        body, is_last = piece.body, piece.end_of_stream
    elif kind != NO_KIND:
        is_request = kind == REQUEST_TRAILERS
        trailers = message.request_trailers if is_request else message.response_trailers
        texts = _texts_of(trailers.trailers, names)
    modes = None
    if message.HasField("protocol_config"):
        config = message.protocol_config
        modes = (config.request_body_mode, config.response_body_mode)
    context = _context_of(message)
    return ProxyMessage(kind, texts, body, is_last, modes, context, values, None, len(sent))


def _texts_of(part: HeaderMap, names: frozenset[str]) -> dict[str, str]:
    """Returns the texts of headers.

    Envoy fills raw_value, other proxies value (core/v3/base.proto).
    """
    texts = {}
    for header in part.headers:
        key = header.key  # created anew on each access
        if key in names:
            raw = header.raw_value[:TEXT_BYTES]
            texts[key] = raw.decode("utf-8", "replace") if raw else header.value[:TEXT_BYTES]
    return texts


def _context_of(message: ProcessingRequest) -> ProcessingRequest | None:
    """Returns a message if it has a context, else None."""
    return message if message.HasField("metadata_context") or message.attributes else None


def _values_of(part: HeaderMap, names: frozenset[str]) -> dict[str, list[bytes]]:
    """Returns the values of headers that are not empty, by their names, in lower case."""
    found: dict[str, list[bytes]] = {}
    for header in part.headers:
        key, value = header.key, header.raw_value or header.value.encode()
        if key in names and value:
            found.setdefault(key, []).append(value)
    return found


# Most decimal digits of a content-length (64 bits).
_LENGTH_DIGITS = 19


def head_of(
    message: ProxyMessage,
    policy_header: str | None,
    naming: NamingHeaders = NO_NAMES,
) -> Head:
    """Returns the parts of a request's headers on which its treatment depends.

    policy_header: the header that may name a policy, in lower case; None without one.
    """
    texts = message.headers
    path, length = texts.get(":path"), texts.get("content-length")
    subset = None if message.context is None else _subset(message.context)
    is_named = not naming.all.isdisjoint(texts)
    return Head(
        texts.get(":method", ""),
        "" if path is None else path_of(path),
        None if length is None else number_of(length, _LENGTH_DIGITS),
        None if policy_header is None else texts.get(policy_header),
        subset,
        _first(texts, naming.session) if is_named else "",
        _first(texts, naming.conversation) if is_named else "",
        texts.get(headers.REQUEST_ID, "")[: headers.MAX_ID_LETTERS],
        texts.get(headers.TRACEPARENT, "")[: headers.MAX_ID_LETTERS],
        _encoding_in(texts.get("content-encoding", "")),
    )


def _encoding_in(written: str) -> str:
    encoding = written.strip().lower()
    return "" if encoding == "identity" else encoding


def _first(texts: Mapping[str, str], naming: Sequence[str]) -> str:
    """Returns the first of these headers that is not empty, "" if all are."""
    for header in naming:
        text = texts.get(header)
        if text:
            return text
    return ""


def _subset(context: ProcessingRequest) -> frozenset[str] | None:
    """Returns the endpoints that the proxy's hint allows, None without a hint."""
    if not context.HasField("metadata_context"):
        return None
    namespace = context.metadata_context.filter_metadata.get(headers.SUBSET_NAMESPACE)
    if namespace is None or headers.SUBSET not in namespace.fields:
        return None
    hint = namespace.fields[headers.SUBSET]
    if hint.WhichOneof("kind") == "list_value":
        return subset_of([each.string_value for each in hint.list_value.values])
    return subset_of(hint.string_value)
