"""gRPC over HTTP/2: messages in DATA, and the status in trailers.

Source: grpc/grpc, doc/PROTOCOL-HTTP2.md.
"""

from enum import IntEnum
from struct import Struct
from typing import Final

from extproc.base.errors import CallError
from extproc.http2.header_blocks import RequestHead, encode

_PREFIX: Final = Struct(">BI")
PREFIX_BYTES: Final = 5

Piece = bytes | memoryview

_CONTENT_TYPES = (b"application/grpc", b"application/grpc+proto")
_PARAMETERS = (b"application/grpc;", b"application/grpc+proto;")

ANSWER_HEAD: Final = encode([(b":status", b"200"), (b"content-type", b"application/grpc")])
OK_TRAILERS: Final = encode([(b"grpc-status", b"0")])


class Status(IntEnum):
    """The gRPC statuses used here (grpc/grpc, doc/statuscodes.md)."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


# A message of this length or more is not joined by its reader, but kept in parts of this length:
# joining all of it at once would hold up everybody else.
LONG_BYTES: Final = 1024 * 1024
_PART_BYTES: Final = 64 * 1024


class Parts:
    """A long message in parts, each of type bytes: a thread can join them beside others."""

    __slots__ = ("_bytes", "parts")

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts
        self._bytes = sum(map(len, parts))

    def __len__(self) -> int:
        return self._bytes


Message = Piece | Parts


class MessageReader:
    """Joins pieces of DATA into gRPC messages, long ones into parts.

    max_message_bytes: a longer message is refused by its prefix alone, before any of it is kept.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._incomplete = bytearray()
        self._parts: list[bytes] = []
        self._missing = 0

    @property
    def buffered_bytes(self) -> int:
        """The number of kept bytes of an incomplete message."""
        return len(self._incomplete) + _PART_BYTES * len(self._parts)

    def read(self, data: Piece) -> list[Message]:
        """Returns the messages that this piece completes, and keeps the rest.

        A message in one piece is not copied, one in many is copied once, a long one twice.

        Raises:
            CallError: a message is too long or compressed; do not use the reader again.
        """
        if not self._incomplete and not self._parts and len(data) >= PREFIX_BYTES:
            length = self._length(data)
            if length == len(data) - PREFIX_BYTES:
                return [data[PREFIX_BYTES:]]
        return self._read_parts(memoryview(data))

    def _read_parts(self, view: memoryview) -> list[Message]:
        messages: list[Message] = []
        while view:
            if len(self._incomplete) < PREFIX_BYTES and not self._parts:
                view = self._keep(view, PREFIX_BYTES - len(self._incomplete))
                if len(self._incomplete) < PREFIX_BYTES:
                    break
                self._missing = self._length(self._incomplete)
            size = len(view)
            view = self._keep(view, self._missing)
            self._missing -= size - len(view)
            if not self._missing:
                messages.append(self._join())
                self._incomplete = bytearray()
            elif len(self._incomplete) >= _PART_BYTES and self._is_long:
                self._part()
        return messages

    @property
    def _is_long(self) -> bool:
        return bool(self._parts) or self._length(self._incomplete) >= LONG_BYTES

    def _part(self) -> None:
        """Puts the first bytes of a long message, or its next ones, into parts."""
        whole = len(self._incomplete) // _PART_BYTES * _PART_BYTES
        with memoryview(self._incomplete) as view:
            self._parts += [
                bytes(view[at : at + _PART_BYTES]) for at in range(0, whole, _PART_BYTES)
            ]
        del self._incomplete[:whole]

    def _join(self) -> Message:
        if not self._parts:
            return memoryview(self._incomplete)[PREFIX_BYTES:]
        parts, self._parts = self._parts, []
        parts[0] = parts[0][PREFIX_BYTES:]
        return Parts([*parts, bytes(self._incomplete)])

    def _keep(self, view: memoryview, size: int) -> memoryview:
        """Keeps up to this many bytes; returns the rest."""
        self._incomplete += view[:size]
        return view[size:]

    def _length(self, data: Piece | bytearray) -> int:
        """Returns the length of the message that begins here."""
        compressed, length = _PREFIX.unpack_from(data)
        if compressed:
            raise CallError(Status.UNIMPLEMENTED, "compressed messages are not supported")
        if length > self._max_message_bytes:
            raise CallError(Status.RESOURCE_EXHAUSTED, f"message of {length} bytes is too long")
        return int(length)


def refusal_of(head: RequestHead) -> bytes | None:
    """Returns the header block that refuses an unsupported request, None if it is supported."""
    if head.method != b"POST":
        return encode([(b":status", b"405"), (b"allow", b"POST")])
    content_type = head.content_type.lower()
    if content_type not in _CONTENT_TYPES and not content_type.startswith(_PARAMETERS):
        return encode([(b":status", b"415")])
    if head.encoding not in (b"", b"identity"):
        return trailers_only(Status.UNIMPLEMENTED, "compressed messages are not supported")
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
