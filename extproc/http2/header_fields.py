"""Where the fields of a header block begin and end, without decoding them (RFC 7541, section 6)."""

# The first byte: 1xxxxxxx an index; 01xxxxxx, 0001xxxx and 0000xxxx literals, with the index of
# their name or 0; 001xxxxx a table size. The x begin an integer (section 5.1).
_INDEXED, _INDEX_PREFIX_MAX = 0x80, 0x7F
_ADDED, _ADDED_PREFIX_MAX = 0x40, 0x3F
_SIZE_UPDATE = 0x20
_LITERAL_PREFIX_MAX = 0x0F
_LENGTH_PREFIX_MAX = 0x7F
_MORE = 0x80

# Of a length; longer strings are in no block that is worth it, and numbers would grow with theirs.
_MAX_LENGTH_BYTES = 3


def cut_at_fields(block: bytes) -> list[bytes] | None:
    """The fields of a block, encoded; None where it holds anything else or is not plain to cut."""
    fields = []
    at, end = 0, len(block)
    try:
        while at < end:
            start, first = at, block[at]
            if first & _INDEXED:
                at = _behind_integer(block, at, _INDEX_PREFIX_MAX)
            elif first & _ADDED or not first & _SIZE_UPDATE:
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
    """A length, then so many bytes (RFC 7541, section 5.2)."""
    length = block[at] & _LENGTH_PREFIX_MAX
    if length < _LENGTH_PREFIX_MAX:
        return at + 1 + length
    for shift in range(_MAX_LENGTH_BYTES):
        at += 1
        length += (block[at] & ~_MORE) << 7 * shift
        if not block[at] & _MORE:
            return at + 1 + length
    raise OverflowError
