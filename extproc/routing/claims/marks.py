"""Marks: keys of a prompt's prefixes at a few lengths, by which a later prompt is found again.

Chaining a key for every block of a long prompt costs more than a whole pick may. Eight lengths per
octave are exact enough: of a shared prefix of 512 tokens to a million they miss less than a ninth,
of a shorter one less than 64 tokens.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Protocol

import msgspec
import xxhash

from extproc.requests.outline import BYTES_PER_TOKEN, Outline
from kvstate.overlap import Tokens

# Shorter prefixes save too little to matter; this is also the smallest step between two marks.
FIRST_TOKENS = 64

# Marks for each doubling of the length.
MARKS_PER_OCTAVE = 8

# Longest marked prefix in tokens: it bounds the entries for one prompt.
LAST_TOKENS = 1 << 20


def _lengths() -> Iterator[int]:
    length = FIRST_TOKENS
    while length <= LAST_TOKENS:
        yield length
        octave = 1 << (length.bit_length() - 1)
        length += max(FIRST_TOKENS, octave // MARKS_PER_OCTAVE)


LENGTHS = tuple(_lengths())

# The first lengths, by their number: prompts share them, since a copy for each takes longer.
FIRST_LENGTHS = tuple(LENGTHS[:count] for count in range(len(LENGTHS) + 1))
_ENDS = tuple(length * BYTES_PER_TOKEN for length in LENGTHS)
_PARTS = tuple(slice(start, end) for start, end in pairwise((0, *_ENDS)))

_key = xxhash.xxh3_64_intdigest


# Bytes of a key.
KEY_BYTES = 8


class Marks(msgspec.Struct, frozen=True, gc=False):
    """The marks of one prompt: each prefix's length in tokens and its key, shortest first.

    keys: of `KEY_BYTES` each, as `packed` returns them.
    """

    lengths: tuple[int, ...]
    keys: bytes


NO_MARKS = Marks((), b"")


class HasMarks(Protocol):
    """What has marks; see `Marks`."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Their lengths."""

    @property
    def keys(self) -> bytes:
        """Their keys."""


def packed(keys: Sequence[int]) -> bytes:
    """Returns 64-bit keys as bytes."""
    return _layout(len(keys)).pack(*keys)


def unpacked(keys: bytes) -> tuple[int, ...]:
    """Returns the keys that were packed."""
    return _layout(len(keys) // KEY_BYTES).unpack(keys)


@cache  # of at most as many as a prompt or a message may have
def _layout(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def root_key(secret: int, *namespace: str | int | None) -> int:
    """Returns the key before the first token.

    secret: 64 random bits of this process, so that nobody outside can forge a mark. namespace: what
    must be equal for prompts to share blocks: model, adapter, salt.
    """
    return int(_key(msgspec.msgpack.encode((secret, *namespace))))


def marks_of_outline(root: int, outline: Outline) -> Marks:
    """Returns the marks of a prompt of which only the outline is known, in estimated tokens.

    One is where each of its digests ends.
    """
    keys: list[int] = []
    key = root
    for digest in outline.digests:
        key = _key(digest, key)
        keys.append(key)
    lengths = tuple([length // BYTES_PER_TOKEN for length in outline.lengths])
    return Marks(lengths, packed(keys))


def marks_of(root: int, prompt: Tokens) -> Marks:
    """Returns the marks of token ids.

    The last token is left out, since engines compute it again.
    """
    view = memoryview(prompt).cast("B")
    count = bisect_right(_ENDS, len(view) - BYTES_PER_TOKEN)
    keys: list[int] = []
    key = root
    for part in _PARTS[:count]:
        key = _key(view[part], key)
        keys.append(key)
    return Marks(FIRST_LENGTHS[count], packed(keys))
