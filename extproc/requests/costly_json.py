"""JSON that is short to send and costly to decode: told by its marks, before it is decoded.

The decoder stops every thread until it has made all objects of a body. To count brackets, quotes
and commas costs next to nothing. Those in texts do not count; which these are, is looked at only
where there are too many otherwise.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from extproc.errors import RequestError

# What a body may hold, since the decoder stops every thread until it has made all of it. Objects
# and lists: eight for each of as many messages as are keyed. Texts, names of fields among them: a
# dozen and a half for each. Commas: of conversations, and where prompts may be token ids.
MAX_PARTS = 65_536
MAX_TEXTS = 131_072
MAX_COMMAS = 131_072
MAX_ID_COMMAS = 1_048_576

# A body of so many bytes is parsed within a millisecond or two, whatever it holds; a longer one, up
# to so many, if there are only so many brackets in it.
_SMALL_BYTES = 8_192
INLINE_BYTES = 65_536
_INLINE_PARTS = 1_024

# A body is looked through in pieces that stay in the processor's cache, and between which another
# thread gets its turn.
_PIECE_BYTES = 131_072

_BRACKET, _QUOTE, _COMMA = ord("{"), ord('"'), ord(",")
_TO_BRACE = 0x20  # sets "[" to "{", and nothing else


def is_light(body: bytes) -> bool:
    """Returns whether a body is parsed within a millisecond or two, whatever it holds."""
    if len(body) <= _SMALL_BYTES:
        return True
    return len(body) <= INLINE_BYTES and _has_at_most(_INLINE_PARTS, body, _BRACKET, _TO_BRACE)


def refuse_costly(body: bytes, max_commas: int = MAX_COMMAS) -> None:
    """Refuses JSON that would make too many objects, before it is decoded.

    Raises:
        RequestError: too_many_parts.
    """
    if len(body) <= MAX_PARTS:
        return
    most = (MAX_PARTS, 2 * MAX_TEXTS, max_commas)
    marks = ((_BRACKET, _TO_BRACE), (_QUOTE, 0), (_COMMA, 0))
    # what stands in texts counts here, which are mostly the whole of a body; so it may be too much
    if all(_has_at_most(limit, body, *mark) for mark, limit in zip(marks, most, strict=True)):
        return
    found = [0, 0, 0]
    for piece, inside in _pieces(body):
        brackets, quotes, commas = ((piece | fill) == byte for byte, fill in marks)
        found[0] += int(np.count_nonzero(brackets & ~inside))
        found[1] += int(np.count_nonzero(quotes))
        found[2] += int(np.count_nonzero(commas & ~inside))
        if any(count > limit for count, limit in zip(found, most, strict=True)):
            raise RequestError("too_many_parts")


def _has_at_most(limit: int, body: bytes, byte: int, fill: int) -> bool:
    """Whether at most so many bytes are this one; fill: bits that are set in them before."""
    if len(body) <= limit:
        return True
    whole, count = np.frombuffer(body, np.uint8), 0
    for at in range(0, len(body), _PIECE_BYTES):
        piece = whole[at : at + _PIECE_BYTES]
        count += int(np.count_nonzero((piece | fill if fill else piece) == byte))
    return count <= limit


def _pieces(body: bytes) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.bool_]]]:
    """A body in pieces without escapes, and which of their bytes stand in texts."""
    at, is_inside = 0, False
    while at < len(body):
        text = body[at : at + _PIECE_BYTES]
        at += len(text)
        if b"\\" in text:
            # a pair stands for itself; what is left escapes what follows, in the next piece as well
            text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            if text.endswith(b"\\") and at < len(body):
                text, at = text[:-1], at - 1
        piece = np.frombuffer(text, np.uint8)
        inside = np.logical_xor.accumulate(piece == _QUOTE) ^ is_inside
        is_inside = bool(inside[-1])
        yield piece, inside
