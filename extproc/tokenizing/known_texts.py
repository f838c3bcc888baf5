"""Texts that were tokenized before, found again by how they begin.

A conversation's next turn begins with the text of the turn before, so that only what is new has to
be tokenized. Texts are found by hashes of samples of their beginnings, and then compared: a hash
never vouches for tokens. Bounded in bytes; the text asked for least recently goes first.
"""

import sys
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvstate.events import Tokens

# No longer beginning has a key.
_MAX_CHARACTERS = 8 * 1024 * 1024

# Beginnings have keys at these distances: so many characters, or this share of the text so far.
_FIRST_STEPS = (256, 512)
_STEP_CHARACTERS = 1_024
_STEP_SHARE = 32

# So much before the end of each is hashed; to hash all of it would cost more than all the rest.
_SAMPLE_CHARACTERS = 64

# What Python needs besides text and ids, measured: an entry, a key, a cut.
_ENTRY_BYTES = 300
_KEY_BYTES = 180
_CUT_BYTES = 150

# One text may take so much of the whole.
_LARGEST_SHARE = 4


def _steps() -> Iterator[int]:
    """The lengths of beginnings that have keys."""
    yield from _FIRST_STEPS
    end = _STEP_CHARACTERS
    while end <= _MAX_CHARACTERS:
        yield end
        end += max(_STEP_CHARACTERS, end // _STEP_SHARE)


_ENDS = tuple(_steps())


class Cut(msgspec.Struct, frozen=True, gc=False):
    """A place in a text before which its ids are those of the part alone.

    start, end: of the token behind the cut, in characters; it must be there for the cut to hold.
    tokens: ids before the cut.
    """

    start: int
    end: int
    tokens: int


class _Entry(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One text. keys: of its beginnings. Of no interest to the garbage collector, like its cuts."""

    text: str
    ids: Tokens
    cuts: tuple[Cut, ...]
    keys: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """What it takes, with its share of the structures that find it."""
        return (
            sys.getsizeof(self.text)
            + sys.getsizeof(self.ids)
            + _ENTRY_BYTES
            + _KEY_BYTES * len(self.keys)
            + _CUT_BYTES * len(self.cuts)
        )

    def shared_cuts(self, text: str) -> Sequence[Cut]:
        """The cuts up to which another text is the same."""
        if text.startswith(self.text):
            return self.cuts
        shared, same, differing = 0, 0, len(self.cuts)
        while shared < differing:
            middle = (shared + differing) // 2
            end = self.cuts[middle].end
            if text[same:end] == self.text[same:end]:
                shared, same = middle + 1, end
            else:
                differing = middle
        return self.cuts[:shared]


class Known(NamedTuple):
    """What is known of a text.

    ids: of a text that begins alike; this one's own up to the last cut, or all if `is_whole`. Not
        to be changed: other requests share them.
    cuts: those that both texts have.
    keys, like: for `remember`.
    """

    ids: Tokens
    cuts: Sequence[Cut]
    is_whole: bool
    keys: tuple[int, ...]
    like: _Entry | None

    @property
    def new_from(self) -> int:
        """Where the part that is not known begins, in characters."""
        return self.cuts[-1].start if self.cuts else 0


class KnownTexts:
    """The texts of one tokenizer. Not safe to use from several threads at once.

    max_bytes: texts, ids, and what it takes to find them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._entries: OrderedDict[_Entry, None] = OrderedDict()
        self._by_beginning: dict[int, _Entry] = {}

    @property
    def size_bytes(self) -> int:
        """What is in use of `max_bytes`."""
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, text: str) -> Known:
        """What is known of a text; of an unknown one no ids and no cuts."""
        keys = _keys(text)
        entry = self._alike(keys)
        if entry is None:
            return Known(array("I"), (), is_whole=False, keys=keys, like=None)
        self._entries.move_to_end(entry)
        if entry.text == text:
            return Known(entry.ids, entry.cuts, is_whole=True, keys=keys, like=entry)
        return Known(entry.ids, entry.shared_cuts(text), is_whole=False, keys=keys, like=entry)

    def remember(self, text: str, known: Known, ids: Tokens, cuts: Sequence[Cut]) -> None:
        """Keeps a text with all its ids and cuts, in order.

        It takes the place of the text that it was like, if that has no cut that it has not.

        known: as `find` gave it.
        """
        entry = _Entry(text, ids, tuple(cuts), known.keys)
        if not known.keys or entry.size_bytes > self._max_bytes // _LARGEST_SHARE:
            return
        twin = self._by_beginning.get(known.keys[-1])  # from another thread, meanwhile
        if twin is not None and twin.text == text:
            return
        self._entries[entry] = None
        self._size_bytes += entry.size_bytes
        for key in known.keys:
            self._by_beginning[key] = entry
        like = known.like
        if like is not None and like in self._entries and 0 < len(like.cuts) == len(known.cuts):
            self._forget(like)
        while self._size_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))

    def _alike(self, keys: tuple[int, ...]) -> _Entry | None:
        """The entry that shares the longest beginning with a key; of several, the latest."""
        for key in reversed(keys):
            entry = self._by_beginning.get(key)
            if entry is not None:
                return entry
        return None

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry]
        self._size_bytes -= entry.size_bytes
        for key in entry.keys:
            if self._by_beginning.get(key) is entry:
                del self._by_beginning[key]


def _keys(text: str) -> tuple[int, ...]:
    """A hash of every beginning, made from its last characters and the hash before."""
    key, keys = 0, []
    for end in _ENDS[: bisect_right(_ENDS, len(text))]:
        key = hash((key, text[end - _SAMPLE_CHARACTERS : end]))
        keys.append(key)
    return tuple(keys)
