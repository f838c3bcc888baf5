"""A message of the proxy on an ext_proc stream, decoded as far as the router reads it.

Source: envoy/service/ext_proc/v3/external_processor.proto (proto/kvsteer_ext_proc.proto has the
fields). `extproc.serving.proxy_decoder` decodes.
"""

from typing import Final

import msgspec

from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest
from extproc.requests.request import Head

# The kinds of messages, which are the numbers of their fields.
NO_KIND: Final = 0
REQUEST_HEADERS: Final = 2
RESPONSE_HEADERS: Final = 3
REQUEST_BODY: Final = 4
RESPONSE_BODY: Final = 5
REQUEST_TRAILERS: Final = 6
RESPONSE_TRAILERS: Final = 7

# Those of a response.
OF_RESPONSES: Final = frozenset((RESPONSE_HEADERS, RESPONSE_BODY, RESPONSE_TRAILERS))

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


def number_of(text: str, digits: int) -> int | None:
    """Returns a number that is written in at most so many digits; None of another text."""
    is_number = text.isascii() and text.isdigit() and len(text) <= digits
    return int(text) if is_number else None
