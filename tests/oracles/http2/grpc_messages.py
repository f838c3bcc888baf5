"""gRPC over HTTP/2: messages in DATA, and the status in trailers.

Source: grpc/grpc, doc/PROTOCOL-HTTP2.md.
"""

from struct import Struct
from typing import Final, NamedTuple

from extproc.base.errors import CallError
from extproc.http2.codes import Status
from extproc.http2.messages import LONG_BYTES, LongMessage
from tests.oracles.http2.header_blocks import RequestHead, encode

_PREFIX: Final = Struct(">BI")
PREFIX_BYTES: Final = 5

Piece = bytes | memoryview

_CONTENT_TYPES = (b"application/grpc", b"application/grpc+proto")
_PARAMETERS = (b"application/grpc;", b"application/grpc+proto;")

ANSWER_HEAD: Final = encode([(b":status", b"200"), (b"content-type", b"application/grpc")])
# For people who open the port with another client.
NOT_GRPC: Final = b"This port serves gRPC: POST with content-type application/grpc.\n"
_WRONG_METHOD: Final = ((b":status", b"405"), (b"allow", b"POST"))
_PLAIN_TEXT: Final = (b"content-type", b"text/plain")
OK_TRAILERS: Final = encode([(b"grpc-status", b"0")])


_PART_BYTES: Final = 64 * 1024


def joined(message: LongMessage) -> bytes:
    """Returns a message in one piece."""
    before, body, end, behind = message
    return b"".join((before, memoryview(body)[:end], behind))


# A message, or a part of a long one that is not the last; is_whole: the message ends with it.
Received = tuple[bytes, bool]


class MessageReader:
    """Joins pieces of DATA into gRPC messages; passes long ones on in parts.

    max_message_bytes: a longer message is refused by its prefix alone, before any of it is kept.
    fault: why the call must end; then nothing more is read.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self.fault: CallError | None = None
        self._max_message_bytes = max_message_bytes
        self._prefix = b""
        self._missing = 0
        self._incomplete = bytearray()
        self._parts_bytes = 0

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes of an incomplete message, with the parts that were passed on."""
        return len(self._prefix) + len(self._incomplete) + self._parts_bytes

    def forget(self) -> None:
        """Drops the incomplete message."""
        self._prefix = b""
        self._incomplete = bytearray()
        self._parts_bytes = self._missing = 0

    def read(self, piece: Piece) -> list[Received]:
        """Returns the messages that this piece completes and the parts of a long one."""
        found: list[Received] = []
        view = memoryview(piece)
        while self.fault is None:
            if len(self._prefix) < PREFIX_BYTES:
                size = PREFIX_BYTES - len(self._prefix)
                self._prefix += view[:size]
                view = view[size:]
                if len(self._prefix) < PREFIX_BYTES:
                    break
                self._begin()
            else:
                view = self._read_content(view, found)
                if not view:
                    break
        return found

    def _begin(self) -> None:
        compressed, self._missing = _PREFIX.unpack(self._prefix)
        if compressed:
            text = "compressed messages are not supported"
            self.fault = CallError(Status.UNIMPLEMENTED, text)
        elif self._missing > self._max_message_bytes:
            text = f"message of {self._missing} bytes is too long"
            self.fault = CallError(Status.RESOURCE_EXHAUSTED, text)

    def _read_content(self, view: memoryview, found: list[Received]) -> memoryview:
        """Takes what belongs to the present message; returns the rest."""
        part, rest = view[: self._missing], view[self._missing :]
        self._incomplete += part
        self._missing -= len(part)
        if not self._missing:
            found.append((bytes(self._incomplete), True))
            self.forget()
        elif self._is_long and len(self._incomplete) >= _PART_BYTES:
            found.append((bytes(self._incomplete), False))
            self._parts_bytes += len(self._incomplete)
            self._incomplete = bytearray()
        return rest

    @property
    def _is_long(self) -> bool:
        return self._parts_bytes > 0 or len(self._incomplete) + self._missing >= LONG_BYTES


class RefusedRequest(NamedTuple):
    """The answer to an unsupported request: a header block, and a content, which may be empty."""

    block: bytes
    content: bytes


def refusal_of(head: RequestHead) -> RefusedRequest | None:
    """Returns the answer that refuses an unsupported request, None if it is supported."""
    if head.method == b"HEAD":  # RFC 9110, section 9.3.2: its answer has no content
        return RefusedRequest(encode(_WRONG_METHOD), b"")
    if head.method != b"POST":
        return RefusedRequest(encode([*_WRONG_METHOD, _PLAIN_TEXT]), NOT_GRPC)
    content_type = head.content_type.lower()
    if content_type not in _CONTENT_TYPES and not content_type.startswith(_PARAMETERS):
        return RefusedRequest(encode([(b":status", b"415"), _PLAIN_TEXT]), NOT_GRPC)
    if head.encoding not in (b"", b"identity"):
        text = "compressed messages are not supported"
        return RefusedRequest(trailers_only(Status.UNIMPLEMENTED, text), b"")
    return None


def framed(message: bytes) -> bytes:
    """Returns a message with its length prefix."""
    return _PREFIX.pack(0, len(message)) + message


def trailers(status: int, text: str) -> bytes:
    """Returns the header block that ends an answer."""
    if status == Status.OK:
        return OK_TRAILERS
    return encode(_status(status, text))


def trailers_only(status: int, text: str) -> bytes:
    """Returns the header block of an answer that is only a status."""
    head = [(b":status", b"200"), (b"content-type", b"application/grpc")]
    return encode([*head, *_status(status, text)])


def _status(status: int, text: str) -> list[tuple[bytes, bytes]]:
    code = (b"grpc-status", str(int(status)).encode())
    return [code, (b"grpc-message", percent_encoded(text))] if text else [code]


def percent_encoded(text: str) -> bytes:
    """Returns a text encoded for grpc-message: "%", and all except printable ASCII, as %XX."""
    return "".join(
        chr(one) if 0x20 <= one <= 0x7E and one != 0x25 else f"%{one:02X}"
        for one in text.encode("utf-8", "replace")
    ).encode()
