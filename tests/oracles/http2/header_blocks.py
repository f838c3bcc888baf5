"""Header blocks (RFC 7541) of requests and answers.

The server announces a dynamic table of size 0. Until the peer has acknowledged that and set the
size in a block, it may use a table of the default size.

A peer must set the size in the first block behind its acknowledgement if its table has fields then
(RFC 9113, section 4.3.1). One whose table is empty need not, so it is served: a peer that goes on
with a table of the default size finds its fields there, and one without a table names none.
"""

from collections.abc import Iterable, Sequence

import msgspec
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hpack.hpack import Decoder

from extproc.http2.codes import ErrorCode
from tests.oracles.http2.errors import Http2Error

_LENGTH_PREFIX_MAX = 0x7F

Fields = Sequence[tuple[bytes, bytes]]

# RFC 9113, section 8.2.2: headers about the connection are malformed in HTTP/2.
_FORBIDDEN = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
_REQUEST_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_REQUIRED = frozenset((b":method", b":scheme", b":path"))
_NOT_IN_NAMES = frozenset(range(0x21)) | frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ:")
_NOT_IN_NAMES |= frozenset(range(0x7F, 0x100))
_NOT_IN_VALUES = frozenset(b"\0\r\n")


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """The well-formed headers of a request, or its trailers.

    is_request: it has all required fields of a request (RFC 9113, section 8.3.1). is_trailers: it
    has no pseudo-header. content_length: in bytes, None if missing. fields: all of them, in order.
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
    """Returns the head with these fields, None if malformed (RFC 9113, section 8.1.1)."""
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
    if length is not None and not (length.isdigit() and len(length) < 20):
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
    """Returns whether a field is well-formed (RFC 9113, sections 8.2.1 and 8.2.2)."""
    if not name or not _NOT_IN_NAMES.isdisjoint(name) or name in _FORBIDDEN:
        return False
    return name != b"te" or value == b"trailers"


_DEFAULT_TABLE_BYTES = 4096
# RFC 7541, section 4.2: a block may set the smallest size in between, and the last size.
_MAX_SIZE_UPDATES = 2
_SIZE_UPDATE, _SIZE_UPDATE_MASK, _SIZE_PREFIX_MAX = 0x20, 0xE0, 0x1F
# the only encoding of the size 0 (section 5.1)
_SIZE_0 = bytes((_SIZE_UPDATE,))
_TOO_LARGE = "header list too large"
_UNDECODABLE = "undecodable header block"

Field = tuple[bytes, bytes]


class HeaderBlocks:
    """Decodes the blocks of one connection, in their order of arrival."""

    def __init__(self, max_list_bytes: int) -> None:
        self.decoder = Decoder(max_list_bytes)
        self.decoder.max_allowed_table_size = _DEFAULT_TABLE_BYTES
        self._is_forbidden = False
        self._owes_size = False

    def forbid_table(self) -> None:
        """Allows no table from now on (RFC 9113, 4.3.1): the peer acknowledged a size of 0."""
        self._is_forbidden = True
        self._owes_size = bool(self.decoder.header_table.dynamic_entries)

    def decode(self, block: bytes) -> RequestHead | None:
        """Returns the head that a block encodes, None if malformed (RFC 9113, section 8.1.1).

        Raises:
            Http2Error: the block cannot be decoded, or its header list is too large.
        """
        self._check_sizes(block)
        return head_of(self._decoded(block))

    def _check_sizes(self, block: bytes) -> None:
        """Checks the table sizes that a block begins with, besides their encoding."""
        updates = _size_updates(block)
        if updates > _MAX_SIZE_UPDATES:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, "too many table sizes")
        if self._is_forbidden and block[:updates] != _SIZE_0 * updates:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, _UNDECODABLE)
        if self._owes_size and not updates:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, _UNDECODABLE)
        self._owes_size = False

    def _decoded(self, block: bytes) -> list[Field]:
        try:
            decoded = self.decoder.decode(block, raw=True)
        except OversizedHeaderListError:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, _TOO_LARGE) from None
        except (HPACKError, IndexError):  # hpack raises the latter at the end of a cut block
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, _UNDECODABLE) from None
        return [(bytes(name), bytes(value)) for name, value in decoded]


def _size_updates(block: bytes) -> int:
    """Returns how many size updates a block begins with, up to one too many: each may take only one
    byte, so a block could have thousands."""
    found = at = 0
    while (
        found <= _MAX_SIZE_UPDATES
        and at < len(block)
        and block[at] & _SIZE_UPDATE_MASK == _SIZE_UPDATE
    ):
        found += 1
        is_long = block[at] & _SIZE_PREFIX_MAX == _SIZE_PREFIX_MAX
        at += 1
        while is_long and at < len(block):
            is_long = block[at] >= 0x80
            at += 1
    return found


def encode(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns a block of literals without indexing (RFC 7541, 6.2.2), valid in any state."""
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields)


def _string(text: bytes) -> bytes:
    """Returns an encoded string without Huffman coding (RFC 7541, section 5.2)."""
    length = len(text)
    if length < _LENGTH_PREFIX_MAX:
        return bytes((length,)) + text
    prefix = bytearray((_LENGTH_PREFIX_MAX,))
    length -= _LENGTH_PREFIX_MAX
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + text
