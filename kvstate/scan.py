"""Scans the bytes of a request: JSON marks and members in a body.

They are compiled if a C compiler was available (kvstate/native/scan.c); the `plain_` functions do
the same in Python, and tests compare the two.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kvstate.errors import ManyMembersError, NoObjectError

try:
    from kvstate._core import braces as _braces
    from kvstate._core import marks as _marks
    from kvstate._core import marks_outside as _marks_outside
    from kvstate._core import members as _members
    from kvstate._core import sizes as _sizes
    from kvstate._core import splice as _splice
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
_SPACES = re.compile(_SPACE)
_OPENING = re.compile(_SPACE + rb"\{")
_CLOSING = re.compile(_SPACE + rb"\}" + _SPACE)
_MEMBER = re.compile(_SPACE + b'"(' + _INSIDE + b')"' + _SPACE + b":" + _SPACE)
_BRACES = re.compile(_SPACE + rb"\{(" + _SPACE + rb")")
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


class Member(NamedTuple):
    """A member of an object.

    name: unescaped. A member begins behind a brace or comma, and ends before the next one; value
    and value_end are the places of its value, without the space around it.
    """

    name: bytes
    start: int
    end: int
    value: int
    value_end: int


class Members(NamedTuple):
    """What was found in an object.

    each: the members that were asked for, in order. total: how many there are, with all others.
    close: the place of the brace that closes the object. is_named: whether there is a part as
    `Parts` says.
    """

    each: tuple[Member, ...]
    total: int
    close: int
    is_named: bool


class Parts(NamedTuple):
    """Members that are looked for within values.

    walked: in the values of so many of the names that are asked for, the first ones. name: of the
    members, unless they are null. inside: the names of the objects' members in which they may be,
    besides any lists. depth: of lists and objects within each other; what is deeper counts as
    named.
    """

    walked: int = 0
    name: bytes = b""
    inside: tuple[bytes, ...] = ()
    depth: int = 0


NO_PARTS = Parts()

# Numbers by which the compiled scan says why it found no members.
_NO_OBJECT = 1


@lru_cache(64)
def _ended(names: Sequence[bytes]) -> bytes:
    return b"".join([b"%b\0" % name for name in names])


def members(
    body: bytes, names: tuple[bytes, ...], parts: Parts = NO_PARTS, at: int = 0, end: int = -1
) -> Members:
    """Returns the members of the JSON object that a body is whose name is one of these.

    Their names may be escaped. It accepts more than JSON, such as NaN, but finds in JSON what a
    decoder finds.

    names: of lower-case letters and underscores. at, end: where the object lies; the whole body.

    Raises:
        NoObjectError: the body is no object in UTF-8, or is cut off.
        ManyMembersError: it has more than MAX_MEMBERS such members.
    """
    until = len(body) if end < 0 else end
    if not IS_COMPILED:
        return plain_members(body, names, parts, at, until)
    inside = _ended((parts.name, *parts.inside)) if parts.walked else b""
    found = _members(body, at, until, _ended(names), parts.walked, inside, parts.depth)
    if isinstance(found, int):
        raise NoObjectError if found == _NO_OBJECT else ManyMembersError
    each, total, close, is_named = found
    listed = tuple([Member(names[name], *places) for name, *places in each])
    return Members(listed, total, close, is_named)


def braces(body: bytes) -> tuple[int, bool] | None:
    """Returns the place of a body's last brace, and whether nothing is between it and the first.

    Returns None if the body does not begin and end with braces, besides space.
    """
    return _braces(body) if IS_COMPILED else plain_braces(body)


# A change of a body: where the part begins and ends in whose place these bytes come.
Edit = tuple[int, int, bytes]


def splice(body: bytes, edits: tuple[Edit, ...]) -> bytes:
    """Returns a body with these changes, which are in order of their places.

    The compiled one copies a long body without keeping other threads from their turns.
    """
    return _splice(body, edits) if IS_COMPILED else plain_splice(body, edits)


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


def plain_braces(body: bytes) -> tuple[int, bool] | None:
    """Does in Python what `braces` does."""
    opening, close = _BRACES.match(body), len(body.rstrip(b" \t\r\n")) - 1
    if opening is None or close < opening.start(1) or body[close : close + 1] != b"}":
        return None
    return close, opening.end() == close


def plain_splice(body: bytes, edits: tuple[Edit, ...]) -> bytes:
    """Does in Python what `splice` does."""
    made, at = [], 0
    for start, end, new in edits:
        made += [body[at:start], new]
        at = end
    return b"".join([*made, body[at:]])


def plain_members(
    body: bytes,
    names: tuple[bytes, ...],
    parts: Parts = NO_PARTS,
    at: int = 0,
    until: int | None = None,
) -> Members:
    """Does in Python what `members` does."""
    scan = _PlainScan(body[:until], names, parts)
    return scan.read(at)


class _PlainScan:
    """Reads the members of one object."""

    def __init__(self, body: bytes, names: tuple[bytes, ...], parts: Parts) -> None:
        self._body = body
        self._names = names
        self._parts = parts
        self._is_named = False

    def read(self, at: int) -> Members:
        body, opening = self._body, _OPENING.match(self._body, at)
        if opening is None:
            raise NoObjectError
        each: list[Member] = []
        count, end = 0, opening.end() - 1
        empty = _CLOSING.match(body, end + 1)
        while empty is None and body[end : end + 1] != b"}":
            start = end + 1
            key = self._key(start)
            name = _ESCAPED.sub(_letter, key[1])
            value = at = key.end()
            if name in self._names[: self._parts.walked] and body[at : at + 1] in (b"[", b"{"):
                at = self._look_into(at, self._parts.depth)
            end = _end_of_value(body, at)
            if body[end : end + 1] == b"]":
                raise NoObjectError
            count += 1
            if name in self._names:
                value_end = value + len(body[value:end].rstrip(b" \t\r\n"))
                each.append(Member(name, start, end, value, value_end))
        closing = _CLOSING.match(body, end) if empty is None else empty
        if closing is None or closing.end() != len(body):
            raise NoObjectError
        if len(each) > MAX_MEMBERS:
            raise ManyMembersError
        close = body.index(b"}", end + (empty is not None))
        return Members(tuple(each), count, close, self._is_named)

    def _key(self, at: int) -> re.Match[bytes]:
        key = _MEMBER.match(self._body, at)
        if key is None:
            raise NoObjectError
        return key

    def _look_into(self, at: int, depth: int) -> int:
        """Returns the place behind the list or object that begins here."""
        body = self._body
        if not depth:
            self._is_named = True
            return at
        closing = b"}" if body[at : at + 1] == b"{" else b"]"
        first = _SPACES.match(body, at + 1).end()  # type: ignore[union-attr]
        if body[first : first + 1] == closing:
            return first + 1
        while True:
            at = self._look_at_item(at + 1, depth - 1, is_member=closing == b"}")
            if body[at : at + 1] != b",":
                break
        if body[at : at + 1] != closing:
            raise NoObjectError
        return at + 1

    def _look_at_item(self, at: int, depth: int, *, is_member: bool) -> int:
        """Returns the place behind an item of a list, or a member, that begins here."""
        body, is_inside = self._body, True
        at = _SPACES.match(body, at).end()  # type: ignore[union-attr]
        if is_member:
            key = self._key(at)
            name, at = _ESCAPED.sub(_letter, key[1]), key.end()
            is_inside = name in self._parts.inside
            self._is_named |= name == self._parts.name and body[at : at + 4] != b"null"
        if is_inside and body[at : at + 1] in (b"[", b"{"):
            at = self._look_into(at, depth)
        return _end_of_value(body, at)


def _letter(escape: re.Match[bytes]) -> bytes:
    return bytes.fromhex(escape[1].decode())


def _end_of_value(body: bytes, at: int) -> int:
    """Returns the place of the comma or closing bracket that ends a value."""
    depth = 0
    for mark in _MARK.finditer(body, at):
        match mark[0]:
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]" if depth:
                depth -= 1
            case b"}" | b"]":
                return mark.start()
            case b"," if not depth:
                return mark.start()
            case b'"':  # a text without an end
                break
    raise NoObjectError
