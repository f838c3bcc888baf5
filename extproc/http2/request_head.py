"""What the fields of a header block have to be, and what is read of them (RFC 9113, section 8)."""

from collections.abc import Sequence
from dataclasses import dataclass

Fields = Sequence[tuple[bytes, bytes]]

# RFC 9113, section 8.2.2: what belongs to a connection is malformed in HTTP/2.
_FORBIDDEN = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
_REQUEST_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_REQUIRED = frozenset((b":method", b":scheme", b":path"))
_NOT_IN_NAMES = frozenset(range(0x21)) | frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ:")
_NOT_IN_NAMES |= frozenset(range(0x7F, 0x100))
_NOT_IN_VALUES = frozenset(b"\0\r\n")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Headers that are well formed, of a request or its trailers.

    is_request: it has what every request has (RFC 9113, section 8.3.1). is_trailers: it has no
    pseudo-header. content_length: in bytes, None if not told. fields: all of them, in order.
    """

    is_request: bool
    is_trailers: bool
    method: bytes
    path: bytes
    content_type: bytes
    encoding: bytes
    content_length: int | None
    fields: Fields


def head_of(fields: Fields) -> RequestHead | None:
    """The head that these fields make, None if they are malformed (RFC 9113, section 8.1.1)."""
    known: dict[bytes, bytes] = {}
    is_regular = False
    for name, value in fields:
        if name.startswith(b":"):
            if is_regular or name not in _REQUEST_PSEUDO or name in known:
                return None
        else:
            is_regular = True
            if not _is_allowed(name, value):
                return None
        if not _NOT_IN_VALUES.isdisjoint(value) or value != value.strip(b" \t"):
            return None
        known[name] = value
    length = known.get(b"content-length")
    if length is not None and not (length.isdigit() and len(length) < 20):  # noqa: PLR2004 - 64 bits
        return None
    return RequestHead(
        known.keys() >= _REQUIRED and known[b":path"] != b"",
        known.keys().isdisjoint(_REQUEST_PSEUDO),
        known.get(b":method", b""),
        known.get(b":path", b""),
        known.get(b"content-type", b""),
        known.get(b"grpc-encoding", b""),
        None if length is None else int(length),
        fields,
    )


def _is_allowed(name: bytes, value: bytes) -> bool:
    """RFC 9113, sections 8.2.1 and 8.2.2."""
    if not name or not _NOT_IN_NAMES.isdisjoint(name) or name in _FORBIDDEN:
        return False
    return name != b"te" or value == b"trailers"
