"""Marks: keys of a prompt's prefixes at a few lengths, so that what was sent can be met again.

Chaining a key for every block of a long prompt costs more than a whole pick may. What we sent where
need not be known that exactly: eight lengths an octave miss a ninth of a shared prefix at most.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from kvstate.events import Tokens

BYTES_PER_TOKEN = 4

# Shorter prefixes save no work worth a choice; this is also the least step between two marks.
FIRST_TOKENS = 64

# Marks behind each doubling of the length.
MARKS_PER_OCTAVE = 8

# Behind this no more marks are made: an index entry a mark, for any prompt.
LAST_TOKENS = 1 << 20


def _lengths() -> Iterator[int]:
    length = FIRST_TOKENS
    while length <= LAST_TOKENS:
        yield length
        octave = 1 << (length.bit_length() - 1)
        length += max(FIRST_TOKENS, octave // MARKS_PER_OCTAVE)


LENGTHS = tuple(_lengths())
_ENDS = tuple(length * BYTES_PER_TOKEN for length in LENGTHS)

_key = xxhash.xxh3_64_intdigest


class Marks(NamedTuple):
    """The marks of one prompt: how many tokens lie before each, and its key, shortest first."""

    lengths: Sequence[int]
    keys: Sequence[int]


NO_MARKS = Marks((), ())


def root_key(secret: int, *namespace: str | int | None) -> int:
    """The key before the first token.

    secret: 64 random bits of this process, so that nobody outside can aim for a mark. namespace:
    what must be equal for prompts to share anything: model, adapter, salt.
    """
    return int(_key(msgspec.msgpack.encode((secret, *namespace))))


def marks_of(root: int, prompt: Tokens | bytes) -> Marks:
    """The marks of token ids, or of text: four bytes of it count as one token.

    The last token is left out, since an engine always computes it.
    """
    view = memoryview(prompt).cast("B")
    count = bisect_right(_ENDS, len(view) - BYTES_PER_TOKEN)
    keys: list[int] = []
    key, start = root, 0
    for end in _ENDS[:count]:
        key = _key(view[start:end], key)
        keys.append(key)
        start = end
    return Marks(LENGTHS[:count], keys)
