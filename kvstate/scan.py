"""Scans the bytes of a request: JSON marks and members in a body.

They are compiled if a C compiler was available (kvstate/native/scan.c); the `plain_` functions do
the same in Python, and tests compare the two.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

try:
    from kvstate._core import marks as _marks
    from kvstate._core import marks_outside as _marks_outside
    from kvstate._core import members as _members
    from kvstate._core import sizes as _sizes
except ImportError:  # there was no C compiler at installation
    IS_COMPILED = False
else:
    IS_COMPILED = True

# The plain scan creates an object for every text, so it processes this many bytes at a time.
_PIECE_BYTES = 131_072


# Most members that are found in one object: more are no honest client's.
MAX_MEMBERS = 64

# Possessive, so that a long text takes no memory to go back.
_INSIDE = rb'[^"\\]*+(?:\\[\x00-\xff][^"\\]*+)*+'
_SPACE = rb"[ \t\r\n]*"
_OPENING = re.compile(_SPACE + rb"\{")
_CLOSING = re.compile(_SPACE + rb"\}" + _SPACE)
_MEMBER = re.compile(_SPACE + b'"(' + _INSIDE + b')"' + _SPACE + b":")
_MARK = re.compile(b'"' + _INSIDE + rb'"|[][{},"]')
_TEXT = re.compile(rb'"([^"\\]*+(?:\\[\x00-\xff]?[^"\\]*+)*+)"?')
_HAS_NUMBERED = re.compile(rb"[^\\]*+(?:\\[^u][^\\]*+)*+\\u")
_MOST_WIDTH = 4  # bytes of a character
_ESCAPED = re.compile(rb"\\u00([0-9a-fA-F]{2})")


class BodyMarks(NamedTuple):
    """The number of marks in a body; brackets: those that open an object or a list."""

    brackets: int
    quotes: int
    commas: int


def marks(body: bytes) -> BodyMarks:
    """Counts the marks of a body, including those within texts."""
    return BodyMarks(*_marks(body)) if IS_COMPILED else plain_marks(body)


def marks_outside(body: bytes, max_quotes: int) -> BodyMarks:
    """Counts the marks of a body, except escaped quotes and marks within texts.

    max_quotes: with more, the rest of the body is not scanned.
    """
    plain = plain_marks_outside
    return BodyMarks(*_marks_outside(body, max_quotes)) if IS_COMPILED else plain(body, max_quotes)


def sizes(written: bytes) -> tuple[int, int]:
    """Returns how many values JSON has at most after the first, and the bytes of its texts.

    These are what they take at most once they are decoded.
    """
    return _sizes(written) if IS_COMPILED else plain_sizes(written)


def plain_sizes(written: bytes) -> tuple[int, int]:
    """Does in Python what `sizes` does."""
    outside = plain_marks(_TEXT.sub(b"", written))
    texts = sum(len(one) * _width(one) for one in _TEXT.findall(written))
    return outside.brackets + outside.commas, texts


def _width(text: bytes) -> int:
    return 1 if text.isascii() and not _HAS_NUMBERED.match(text) else _MOST_WIDTH


# A part of a body: the place of its first byte, and the place behind its last one.
Span = tuple[int, int]


def members(body: bytes, names: Collection[bytes]) -> tuple[Span, ...] | None:
    """Returns the members of the JSON object that a body is whose name is one of these.

    A member begins behind a brace or comma and ends before the next one. Its name may be escaped.
    Returns None if the body is no object, is cut off, or has more than MAX_MEMBERS such members.
    It accepts more than JSON, such as NaN, but finds in JSON what a decoder finds.

    names: of lower-case letters and underscores.
    """
    ended = b"".join([b"%b\0" % name for name in names])
    return _members(body, ended) if IS_COMPILED else plain_members(body, names)


def named(body: bytes, member: Span) -> tuple[bytes, int]:
    """Returns the name of a member that `members` found, unescaped, and the place of its value."""
    found = _MEMBER.match(body, *member)
    if found is None:
        raise ValueError("not a member")
    return _ESCAPED.sub(_letter, found[1]), found.end()


def plain_marks(body: bytes) -> BodyMarks:
    """Does in Python what `marks` does."""
    return BodyMarks(body.count(b"{") + body.count(b"["), body.count(b'"'), body.count(b","))


def plain_marks_outside(body: bytes, max_quotes: int) -> BodyMarks:
    """Does in Python what `marks_outside` does."""
    if b"\\" in body:  # pairs are literal backslashes; a remaining one may escape a quote
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes = body.count(b'"')
    if quotes > max_quotes:
        return BodyMarks(0, quotes, 0)
    brackets = commas = is_inside = 0
    for at in range(0, len(body), _PIECE_BYTES):
        parts = body[at : at + _PIECE_BYTES].split(b'"')
        outside = b"".join(parts[is_inside::2])
        brackets += outside.count(b"{") + outside.count(b"[")
        commas += outside.count(b",")
        is_inside ^= (len(parts) - 1) & 1
    return BodyMarks(brackets, quotes, commas)


def plain_members(body: bytes, names: Collection[bytes]) -> tuple[Span, ...] | None:
    """Does in Python what `members` does."""
    opening = _OPENING.match(body)
    if opening is None:
        return None
    found: list[Span] = []
    end = opening.end() - 1
    is_first = True
    while body[end : end + 1] != b"}":
        start = end + 1
        named = _MEMBER.match(body, start)
        end = -1 if named is None else _end_of_value(body, named.end())
        if named is None or end < 0:
            empty = _CLOSING.match(body, start) if is_first else None
            return None if empty is None or empty.end() < len(body) else ()
        if _ESCAPED.sub(_letter, named[1]) in names:
            if len(found) == MAX_MEMBERS:
                return None
            found.append((start, end))
        is_first = False
    closing = _CLOSING.match(body, end)
    is_whole = closing is not None and closing.end() == len(body)
    return tuple(found) if is_whole else None


def _letter(escape: re.Match[bytes]) -> bytes:
    return bytes.fromhex(escape[1].decode())


def _end_of_value(body: bytes, at: int) -> int:
    """Returns the place of the comma or brace that ends a value, -1 if there is none."""
    depth = 0
    for mark in _MARK.finditer(body, at):
        match mark[0]:
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]" if depth:
                depth -= 1
            case b"}":
                return mark.start()
            case b"," if not depth:
                return mark.start()
            case b"]" | b'"':  # nothing that it could end, or a text without an end
                return -1
    return -1
