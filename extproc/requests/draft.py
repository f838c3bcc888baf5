"""A body that is being changed: members are found by their bytes, cut out, and added at its end.

All other bytes stay. Of several members with one name engines take the last one, so who takes a
member out takes out all. A body is read as Python's json reads it, which the engines' front ends
use: in UTF-8, and if there is a byte order mark, or a NUL among the first bytes, in what they say;
such a body is written anew in UTF-8 once something in it changes. (SGLang 0.5.23 reads with orjson
and vLLM's Rust front end with serde_json: they refuse all but UTF-8 without a mark.)
"""

import codecs
import json
from collections.abc import Iterator
from enum import StrEnum

from extproc.base.errors import UnclearError
from kvstate import scan
from kvstate.errors import ManyMembersError, NoObjectError
from kvstate.scan import NO_PARTS, Edit, Member, Members, Parts

# A longer body in UTF-16 or UTF-32 is not written anew: that holds up other threads.
MAX_WIDE_BYTES = 4 * 1024 * 1024

# Python's json tells the encodings apart by the first bytes.
_FIRST_BYTES = 4

# How gzip (RFC 1952) and Zstandard begin, and Zstandard's frames that are skipped (RFC 8878) from
# their second byte on. SGLang 0.5.23 inflates the latter if its operator wants it
# (SGLANG_ENABLE_REQUEST_DECOMPRESSION).
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
_SKIPPED = b"\x2a\x4d\x18"

_UTF_8, _MARKED = "utf-8", "utf-8-sig"


class Unclear(StrEnum):
    """Why a body is not read with certainty, as it is counted."""

    NO_OBJECT = "no_object"  # certainly none for Python's json, in any encoding that it reads
    TOO_MANY = "too_many_members"
    COMPRESSED = "compressed"  # something before the engine may inflate it
    TOO_LARGE = "too_large"  # to be written anew
    UNREAD = "unread"  # longer than extproc.max_body_bytes, or not sent whole


class Draft:
    """A body's object, and what is to become of it. is_named: as `scan.Members` says.

    each: the members that were asked for, in order.
    """

    def __init__(self, original: bytes, body: bytes, found: Members) -> None:
        self._original = original
        self._body = body
        self._found = found
        self._cuts: list[tuple[int, int]] = []
        self._cut_of_object = 0
        self._added: list[bytes] = []
        self.each = found.each
        self.is_named = found.is_named

    def named(self, name: bytes) -> list[Member]:
        """Returns the members of the object with this name."""
        return [one for one in self.each if one.name == name]

    def value(self, member: Member, most_bytes: int) -> bytes | None:
        """Returns a member's value as it is written, None if it is longer than this."""
        is_long = member.value_end - member.value > most_bytes
        return None if is_long else self._body[member.value : member.value_end]

    def view(self, member: Member) -> memoryview:
        """Returns a member's value as it is written, however long it is, without a copy."""
        return memoryview(self._body)[member.value : member.value_end]

    def inside(self, member: Member, names: tuple[bytes, ...]) -> tuple[Member, ...]:
        """Returns the members with these names of the object that is a member's value.

        Raises:
            UnclearError: it has too many, or what it is cannot be told.
        """
        if self._body[member.value : member.value + 1] != b"{":
            return ()
        at, end = member.value, member.value_end
        return _members(self._body, names, NO_PARTS, at, end).each

    def cut(self, member: Member, *, is_inner: bool = False) -> None:
        """Takes a member out. is_inner: whether `inside` found it."""
        self._cuts.append((member.start, member.end))
        self._cut_of_object += not is_inner

    def add(self, fields: bytes) -> None:
        """Adds members to the end of the object. fields: JSON without the braces around it."""
        self._added.append(fields)

    def written(self) -> bytes:
        """Returns the body with its changes; the very object that was read if there are none."""
        if not self._cuts and not self._added:
            return self._original
        edits: list[Edit] = [(start, end, b"") for start, end in self._spans()]
        if self._added:
            is_left = self._found.total > self._cut_of_object
            parts = [*([b""] if is_left else ()), *self._added]
            edits.append((self._found.close, len(self._body), b",".join(parts) + b"}"))
        return scan.splice(self._body, tuple(edits))

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Returns the parts to cut: each member with the comma that is not needed without it.

        That is the one behind it. Behind the last of an object there is none, so it takes the one
        before it, or before those that are cut with it.
        """
        spans: list[tuple[int, int]] = []
        for start, end in sorted(self._cuts):
            if self._body[end : end + 1] == b",":
                spans.append((start, end + 1))
                continue
            first = start
            while spans and spans[-1][1] == first:
                first = spans.pop()[0]
            spans.append((first - (self._body[first - 1 : first] == b","), end))
        return iter(spans)


def read(body: bytes, names: tuple[bytes, ...], parts: Parts = NO_PARTS) -> Draft:
    """Returns a body whose object's members with these names are known.

    Raises:
        UnclearError: they are not; it says why.
    """
    plain = _in_utf8(body)
    return Draft(body, plain, _members(plain, names, parts, 0, len(plain)))


def _members(body: bytes, names: tuple[bytes, ...], parts: Parts, at: int, end: int) -> Members:
    try:
        return scan.members(body, names, parts, at, end)
    except NoObjectError:
        raise UnclearError(Unclear.NO_OBJECT) from None
    except ManyMembersError:
        raise UnclearError(Unclear.TOO_MANY) from None


def _in_utf8(body: bytes) -> bytes:
    """Returns a body as Python's json would read it, in UTF-8 without a mark."""
    if body.startswith(_COMPRESSED) or body.startswith(_SKIPPED, 1):
        raise UnclearError(Unclear.COMPRESSED)
    encoding = json.detect_encoding(body[:_FIRST_BYTES])
    if encoding == _UTF_8:
        return body
    if encoding == _MARKED:
        return scan.splice(body, ((0, len(codecs.BOM_UTF8), b""),))
    if len(body) > MAX_WIDE_BYTES:
        raise UnclearError(Unclear.TOO_LARGE)
    try:
        return body.decode(encoding, "surrogatepass").encode(_UTF_8, "surrogatepass")
    except UnicodeError:
        raise UnclearError(Unclear.NO_OBJECT) from None
