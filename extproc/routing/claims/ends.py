"""Ends: where the last request of a conversation ended, by which its next one is found.

The next request repeats what the last one asked, so the end of that one lies within it. A prompt in
tokens ends a little earlier here than it does: with the last tokens templates ask for the answer,
and what they write there need not be what they write before that answer in the next prompt.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import msgspec
import xxhash

from extproc.requests.outline import BYTES_PER_TOKEN
from extproc.routing.claims.marks import KEY_BYTES, LENGTHS, Marks, unpacked
from kvstate.overlap import Tokens

# So many last tokens of a prompt are left out. A template that asks for the answer with more, and
# writes them otherwise later, makes of the next turn a conversation that is not known.
ASKING_TOKENS = 16

# Makes the key of a conversation's end another one than its mark's.
_END = 0x9E3779B97F4A7C15

# Returns the bytes of some of a prompt's tokens, from and to.
Part = Callable[[Tokens, int, int], bytes | memoryview]


class End(msgspec.Struct, frozen=True, gc=False):
    """Where a request of a conversation ended.

    key: of the end. mark: the key of the last mark before it. length: its tokens up to there; 0 if
    the mark itself is the end, as in texts.
    """

    key: int
    mark: int = 0
    length: int = 0


def part_of_tokens(tokens: Tokens, start: int, stop: int) -> memoryview:
    """Returns the bytes of some of a prompt's tokens."""
    return memoryview(tokens).cast("B")[start * BYTES_PER_TOKEN : stop * BYTES_PER_TOKEN]


def end_of_text(marks: Marks) -> End | None:
    """Returns the end of a conversation known as text; None if it is too short to have one."""
    last = marks.keys[-KEY_BYTES:]
    return End(int.from_bytes(last, "little") ^ _END) if last else None


def ends_in_text(marks: Marks) -> Sequence[int]:
    """Returns the keys of all ends that a conversation may have had before, the latest first."""
    return [key ^ _END for key in reversed(unpacked(marks.keys))]


def end_of_tokens(marks: Marks, tokens: Tokens, part: Part = part_of_tokens) -> End | None:
    """Returns the end of a prompt; None if it is too short to have one."""
    length = len(tokens) - ASKING_TOKENS
    place = bisect_right(LENGTHS, length, 0, len(marks.lengths)) - 1
    if place < 0:
        return None
    mark = int.from_bytes(marks.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES], "little")
    return End(end_key(mark, part(tokens, LENGTHS[place], length)), mark, length)


def end_key(mark: int, behind: bytes | memoryview) -> int:
    """Returns the key of the end of a prompt with these bytes of tokens behind a mark."""
    return xxhash.xxh3_64_intdigest(behind, mark) ^ _END
