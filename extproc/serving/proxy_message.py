"""A message of the proxy on an ext_proc stream, decoded as far as the router reads it.

Source: envoy/service/ext_proc/v3/external_processor.proto (proto/kvsteer_ext_proc.proto has the
fields). protobuf decides what a message says; where a C compiler was at hand,
`extproc/native/message.c` reads what it is sure of, and leaves the rest to protobuf.
"""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from extproc.http2.reading import Reading
from extproc.pb.kvsteer_ext_proc_pb2 import HeaderMap, ProcessingRequest
from extproc.requests.request import Head
from extproc.serving.naming_headers import NamingHeaders

try:
    from extproc._core import CompiledDecoder
except ImportError:  # there was no C compiler at installation
    IS_COMPILED = False
else:
    IS_COMPILED = True

# The kinds of messages, which are the numbers of their fields.
NO_KIND: Final = 0
REQUEST_HEADERS: Final = 2
RESPONSE_HEADERS: Final = 3
REQUEST_BODY: Final = 4
RESPONSE_BODY: Final = 5
REQUEST_TRAILERS: Final = 6
RESPONSE_TRAILERS: Final = 7

NAMES: Final = {
    "request_headers": REQUEST_HEADERS,
    "response_headers": RESPONSE_HEADERS,
    "request_body": REQUEST_BODY,
    "response_body": RESPONSE_BODY,
    "request_trailers": REQUEST_TRAILERS,
    "response_trailers": RESPONSE_TRAILERS,
}

# Header values are cut at this length, since they are kept for the whole stream; no expected value
# is this long.
TEXT_BYTES: Final = 1024


class ProxyMessage(msgspec.Struct, gc=False):
    """One message. kind: NO_KIND if none is set.

    headers: those that the decoder was asked for; given twice, the last one counts. body: the
    piece of a body. is_last: the request or response ends with it. modes: how bodies of the
    request and of the response come (ProtocolConfiguration), None if it does not say.
    context: metadata_context and attributes, None without them. values: all values that are not
    empty, and whole, of the headers that were asked for in this way, by their names. head: of the
    request, if the decoder made it; then headers is empty. size_bytes: of the message as it came.
    """

    kind: int
    headers: dict[str, str]
    body: bytes
    is_last: bool
    modes: tuple[int, int] | None
    context: ProcessingRequest | None
    values: dict[str, list[bytes]] = {}
    head: Head | None = None
    size_bytes: int = 0


class ProxyDecoder:
    """Decodes messages.

    names: of the headers that are read, in lower case. every: those of which every value is read.
    naming: those that name sessions and conversations; None if requests' heads are made elsewhere.
    policy_header: as in `head_of`. compiled: for tests.
    """

    def __init__(
        self,
        names: Iterable[str],
        every: Iterable[str] = (),
        naming: NamingHeaders | None = None,
        policy_header: str | None = None,
        *,
        compiled: bool = IS_COMPILED,
    ) -> None:
        self._names = frozenset(names)
        self._every = frozenset(every)
        self._compiled = None
        if compiled:
            head = None
            if naming is not None:
                named = tuple(naming.session), tuple(naming.conversation)
                head = (Head, policy_header or "", *named)
            self._compiled = CompiledDecoder(
                ProxyMessage, tuple(self._names), tuple(self._every), head
            )

    def reading(self, path: bytes) -> Reading | None:
        """Returns how a session reads the messages of calls on a path; None if it cannot."""
        return None if self._compiled is None else Reading(path, self._compiled)

    def decode(self, message: bytes) -> ProxyMessage:
        """Returns what a message says.

        Raises:
            DecodeError: it is malformed.
        """
        if self._compiled is not None:
            read: ProxyMessage | None = self._compiled.decode(message)
            if read is not None:
                context: Any = read.context
                if context is not None:  # its bytes so far
                    read.context = _context_of(ProcessingRequest.FromString(context))
                return read
        read = self._convert(ProcessingRequest.FromString(message))
        read.size_bytes = len(message)
        return read

    def _convert(self, message: ProcessingRequest) -> ProxyMessage:
        """Returns what a message says that protobuf has decoded."""
        kind = NAMES.get(message.WhichOneof("request") or "", NO_KIND)
        headers: dict[str, str] = {}
        values: dict[str, list[bytes]] = {}
        body, is_last = b"", False
        if kind in (REQUEST_HEADERS, RESPONSE_HEADERS):
            is_request = kind == REQUEST_HEADERS
            part = message.request_headers if is_request else message.response_headers
            headers, is_last = self._texts_of(part.headers), part.end_of_stream
            if self._every:
                values = _values_of(part.headers, self._every)
        elif kind in (REQUEST_BODY, RESPONSE_BODY):
            piece = message.request_body if kind == REQUEST_BODY else message.response_body
            body, is_last = piece.body, piece.end_of_stream
        elif kind != NO_KIND:
            is_request = kind == REQUEST_TRAILERS
            trailers = message.request_trailers if is_request else message.response_trailers
            headers = self._texts_of(trailers.trailers)
        modes = None
        if message.HasField("protocol_config"):
            config = message.protocol_config
            modes = (config.request_body_mode, config.response_body_mode)
        context = _context_of(message)
        return ProxyMessage(kind, headers, body, is_last, modes, context, values)

    def _texts_of(self, headers: HeaderMap) -> dict[str, str]:
        """Returns the texts of headers.

        Envoy fills raw_value, other proxies value (core/v3/base.proto).
        """
        texts = {}
        for header in headers.headers:
            key = header.key  # created anew on each access
            if key in self._names:
                raw = header.raw_value[:TEXT_BYTES]
                texts[key] = raw.decode("utf-8", "replace") if raw else header.value[:TEXT_BYTES]
        return texts


def _context_of(message: ProcessingRequest) -> ProcessingRequest | None:
    """Returns a message if it has a context, else None."""
    return message if message.HasField("metadata_context") or message.attributes else None


def _values_of(headers: HeaderMap, names: frozenset[str]) -> dict[str, list[bytes]]:
    """Returns the values of headers that are not empty, by their names, in lower case."""
    found: dict[str, list[bytes]] = {}
    for header in headers.headers:
        key, value = header.key, header.raw_value or header.value.encode()
        if key in names and value:
            found.setdefault(key, []).append(value)
    return found
