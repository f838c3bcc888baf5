"""Scans the bytes of a request: JSON marks and members in a body.

kvstate/native/scan.c does the work.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kvstate.errors import ManyMembersError, NoObjectError, importing_cores

with importing_cores():
    from kvstate._core import braces as _braces
    from kvstate._core import marks as _marks
    from kvstate._core import marks_outside as _marks_outside
    from kvstate._core import members as _members
    from kvstate._core import sizes as _sizes
    from kvstate._core import splice as _splice

# Most members that are found in one object: no usual client sends more.
MAX_MEMBERS = 64


class BodyMarks(NamedTuple):
    """The number of marks in a body; brackets: those that open an object or a list."""

    brackets: int
    quotes: int
    commas: int


def marks(body: bytes) -> BodyMarks:
    """Counts the marks of a body, including those within texts."""
    return BodyMarks(*_marks(body))


def marks_outside(body: bytes, max_quotes: int) -> BodyMarks:
    """Counts the marks of a body, except escaped quotes and marks within texts.

    max_quotes: with more, the rest of the body is not scanned.
    """
    return BodyMarks(*_marks_outside(body, max_quotes))


def sizes(written: bytes) -> tuple[int, int]:
    """Returns how many values JSON has at most after the first, and the bytes of its texts.

    These are what they take at most once they are decoded.
    """
    return _sizes(written)


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

# What the core returns instead of members of what is no object.
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
    return _braces(body)


# A change of a body: where the part begins and ends in whose place these bytes come.
Edit = tuple[int, int, bytes]


def splice(body: bytes, edits: tuple[Edit, ...]) -> bytes:
    """Returns a body with these changes, which are in order of their places.

    A long body is copied without keeping other threads from their turns.
    """
    return _splice(body, edits)
