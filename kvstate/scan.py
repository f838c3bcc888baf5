"""Scans the bytes of a request: JSON marks in a body, and runs of tokens in a prompt.

They are compiled if a C compiler was available (kvstate/native/scan.c); the `plain_` functions do
the same in Python, and tests compare the two.
"""

from array import array
from itertools import repeat
from typing import NamedTuple

from kvstate.overlap import Tokens

try:
    from kvstate._core import marks as _marks
    from kvstate._core import marks_outside as _marks_outside
    from kvstate._core import runs as _runs
except ImportError:  # there was no C compiler at installation
    IS_COMPILED = False
else:
    IS_COMPILED = True

# Tokens in a run. Shorter runs are common to many texts, longer ones break at every difference.
RUN_TOKENS = 8

_MULTIPLIER = 0x9E3779B97F4A7C15
_POWERS = [pow(_MULTIPLIER, place, 1 << 64) for place in reversed(range(RUN_TOKENS))]
_LAST_64_BITS = (1 << 64) - 1

# The plain scan creates an object for every text, so it processes this many bytes at a time.
_PIECE_BYTES = 131_072


class Marks(NamedTuple):
    """The number of marks in a body; brackets: those that open an object or a list."""

    brackets: int
    quotes: int
    commas: int


def marks(body: bytes) -> Marks:
    """Counts the marks of a body, including those within texts."""
    return Marks(*_marks(body)) if IS_COMPILED else plain_marks(body)


def marks_outside(body: bytes, max_quotes: int) -> Marks:
    """Counts the marks of a body, except escaped quotes and marks within texts.

    max_quotes: with more, the rest of the body is not scanned.
    """
    plain = plain_marks_outside
    return Marks(*_marks_outside(body, max_quotes)) if IS_COMPILED else plain(body, max_quotes)


def runs(tokens: Tokens) -> "array[int]":
    """Returns a number for each run of tokens, in order; equal runs have equal numbers."""
    return array("Q", _runs(tokens)) if IS_COMPILED else plain_runs(tokens)


def plain_marks(body: bytes) -> Marks:
    """Does in Python what `marks` does."""
    return Marks(body.count(b"{") + body.count(b"["), body.count(b'"'), body.count(b","))


def plain_marks_outside(body: bytes, max_quotes: int) -> Marks:
    """Does in Python what `marks_outside` does."""
    if b"\\" in body:  # pairs are literal backslashes; a remaining one may escape a quote
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes = body.count(b'"')
    if quotes > max_quotes:
        return Marks(0, quotes, 0)
    brackets = commas = is_inside = 0
    for at in range(0, len(body), _PIECE_BYTES):
        parts = body[at : at + _PIECE_BYTES].split(b'"')
        outside = b"".join(parts[is_inside::2])
        brackets += outside.count(b"{") + outside.count(b"[")
        commas += outside.count(b",")
        is_inside ^= (len(parts) - 1) & 1
    return Marks(brackets, quotes, commas)


def plain_runs(tokens: Tokens) -> "array[int]":
    """Does in Python what `runs` does."""
    count = max(0, len(tokens) - RUN_TOKENS + 1)
    sums = [0] * count
    for place, power in enumerate(_POWERS):
        products = map(int.__mul__, tokens[place : place + count], repeat(power))
        sums = list(map(int.__add__, sums, products))
    return array("Q", map(int.__and__, sums, repeat(_LAST_64_BITS)))
