"""Scans the bytes of a request as `kvstate.scan` does, in Python."""

import re

from kvstate.errors import ManyMembersError, NoObjectError
from kvstate.scan import MAX_MEMBERS, NO_PARTS, BodyMarks, Edit, Member, Members, Parts

# The plain scan creates an object for every text, so it processes this many bytes at a time.
_PIECE_BYTES = 131_072
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


def sizes(written: bytes) -> tuple[int, int]:
    """Does in Python what `sizes` does."""
    outside = marks(_TEXT.sub(b"", written))
    texts = sum(len(one) * _width(one) for one in _TEXT.findall(written))
    return outside.brackets + outside.commas, texts


def _width(text: bytes) -> int:
    return 1 if text.isascii() and not _HAS_NUMBERED.match(text) else _MOST_WIDTH


def marks(body: bytes) -> BodyMarks:
    """Does in Python what `marks` does."""
    return BodyMarks(body.count(b"{") + body.count(b"["), body.count(b'"'), body.count(b","))


def marks_outside(body: bytes, max_quotes: int) -> BodyMarks:
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


def braces(body: bytes) -> tuple[int, bool] | None:
    """Does in Python what `braces` does."""
    opening, close = _BRACES.match(body), len(body.rstrip(b" \t\r\n")) - 1
    if opening is None or close < opening.start(1) or body[close : close + 1] != b"}":
        return None
    return close, opening.end() == close


def splice(body: bytes, edits: tuple[Edit, ...]) -> bytes:
    """Does in Python what `splice` does."""
    made, at = [], 0
    for start, end, new in edits:
        made += [body[at:start], new]
        at = end
    return b"".join([*made, body[at:]])


def members(
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
