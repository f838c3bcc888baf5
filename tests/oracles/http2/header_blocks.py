"""Header blocks (RFC 7541) of requests and answers.

The server announces a dynamic table of size 0. Once the peer has acknowledged that and set the size
in a block, blocks have no state: equal bytes mean equal headers, so decoded ones are looked up, by
the whole block or, since it may hold a request's id (as in traced streams), field by field. Until
then the peer may use a table of the default size, and every block is decoded.

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

# The first byte: 1xxxxxxx an index; 01xxxxxx, 0001xxxx and 0000xxxx literals, with the index of
# their name or 0; 001xxxxx a table size. The x begin an integer (section 5.1).
_INDEXED, _INDEX_PREFIX_MAX = 0x80, 0x7F
_ADDED, _ADDED_PREFIX_MAX = 0x40, 0x3F
_SIZE_CHANGE = 0x20
_LITERAL_PREFIX_MAX = 0x0F
_LENGTH_PREFIX_MAX = 0x7F
_MORE = 0x80

# Most bytes of a length; blocks with longer strings are not worth caching.
_MAX_LENGTH_BYTES = 3


def cut_at_fields(block: bytes) -> list[bytes] | None:
    """Returns a block's encoded fields; None if it has other parts, or cannot be split simply."""
    fields = []
    at, end = 0, len(block)
    try:
        while at < end:
            start, first = at, block[at]
            if first & _INDEXED:
                at = _behind_integer(block, at, _INDEX_PREFIX_MAX)
            elif first & _ADDED or not first & _SIZE_CHANGE:
                most = _ADDED_PREFIX_MAX if first & _ADDED else _LITERAL_PREFIX_MAX
                at = _behind_integer(block, at, most)
                if not first & most:
                    at = _behind_string(block, at)
                at = _behind_string(block, at)
            else:
                return None
            fields.append(block[start:at])
    except (IndexError, OverflowError):
        return None
    return fields if at == end else None


def _behind_integer(block: bytes, at: int, prefix_max: int) -> int:
    if block[at] & prefix_max != prefix_max:
        return at + 1
    at += 1
    while block[at] & _MORE:
        at += 1
    return at + 1


def _behind_string(block: bytes, at: int) -> int:
    """Returns the position after a string: a length, and that many bytes (RFC 7541, 5.2)."""
    length = block[at] & _LENGTH_PREFIX_MAX
    if length < _LENGTH_PREFIX_MAX:
        return at + 1 + length
    for shift in range(_MAX_LENGTH_BYTES):
        at += 1
        length += (block[at] & ~_MORE) << 7 * shift
        if not block[at] & _MORE:
            return at + 1 + length
    raise OverflowError


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


# A proxy's blocks differ little. Those with a request's id are not found again, and fill the cache:
# when it is full, it is cleared.
_MAX_CACHED = 256
_MAX_CACHED_BLOCK_BYTES = 1024

# Stands for "not decoded yet", as None stands for "malformed".
_UNKNOWN = RequestHead(
    is_request=False,
    is_trailers=False,
    method=b"",
    path=b"",
    content_type=b"",
    encoding=b"",
    content_length=None,
    fields=(),
)

_DEFAULT_TABLE_BYTES = 4096
# Size of a field besides its bytes (RFC 9113, section 6.5.2).
_FIELD_BYTES = 32
# RFC 7541, section 4.2: a block may set the smallest size in between, and the last size.
_MAX_SIZE_UPDATES = 2
_SIZE_UPDATE, _SIZE_UPDATE_MASK, _SIZE_PREFIX_MAX = 0x20, 0xE0, 0x1F
# the only encoding of the size 0 (section 5.1)
_SIZE_0 = bytes((_SIZE_UPDATE,))
_TOO_LARGE = "header list too large"
_UNDECODABLE = "undecodable header block"

Field = tuple[bytes, bytes]


class BlockCache:
    """Decoded blocks without state, for all connections of a server.

    heads: by block; None for a malformed one. fields: by their part of a block.
    """

    def __init__(self) -> None:
        self.heads: dict[bytes, RequestHead | None] = {}
        self.fields: dict[bytes, Field] = {}

    def __len__(self) -> int:
        return len(self.heads)

    def __contains__(self, block: bytes) -> bool:
        return block in self.heads

    def keep(self, block: bytes, head: RequestHead | None) -> None:
        """Keeps the head of a block, unless the block is too long."""
        if len(block) <= _MAX_CACHED_BLOCK_BYTES:
            if len(self.heads) >= _MAX_CACHED:
                self.heads.clear()
            self.heads[block] = head

    def keep_field(self, part: bytes, field: Field) -> None:
        """Keeps a decoded field, unless its part of the block is too long."""
        if len(part) <= _MAX_CACHED_BLOCK_BYTES:
            if len(self.fields) >= _MAX_CACHED:
                self.fields.clear()
            self.fields[part] = field


class HeaderBlocks:
    """Decodes the blocks of one connection, in their order of arrival."""

    def __init__(self, cache: BlockCache, max_list_bytes: int) -> None:
        self._cache = cache
        self._heads = cache.heads
        self._max_list_bytes = max_list_bytes
        self.decoder = Decoder(max_list_bytes)
        self.decoder.max_allowed_table_size = _DEFAULT_TABLE_BYTES
        self._is_stateless = False
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
        if self._is_stateless:
            known = self._heads.get(block, _UNKNOWN)
            if known is not _UNKNOWN:
                return known
            parts = cut_at_fields(block)
            if parts is not None:
                head = head_of(self._looked_up(parts))
                self._cache.keep(block, head)
                return head
        self._check_sizes(block)
        head = head_of(self._decoded(block))
        was_stateless = self._is_stateless
        # a block that reduced the size to 0 also emptied the table
        self._is_stateless = self.decoder.header_table_size == 0
        if was_stateless and self._is_stateless:
            self._cache.keep(block, head)
        return head

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

    def _looked_up(self, parts: Sequence[bytes]) -> list[Field]:
        """Returns the fields of a block without state; decodes only unknown ones."""
        fields = []
        room = self._max_list_bytes
        known = self._cache.fields
        for part in parts:
            field = known.get(part)
            if field is None:
                (field,) = self._decoded(part)
                self._cache.keep_field(part, field)
            room -= len(field[0]) + len(field[1]) + _FIELD_BYTES
            if room < 0:
                raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, _TOO_LARGE)
            fields.append(field)
        return fields

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
