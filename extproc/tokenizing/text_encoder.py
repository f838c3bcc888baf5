"""Turns a prompt's text into ids, and tokenizes only its new part.

A conversation's next turn begins with the text of the turn before, so only the new text must be
tokenized. Earlier texts are found by hashes of samples of their beginnings, and then compared, so
that texts with equal hashes do not get each other's tokens. Memory is bounded in bytes; the least
recently used text is dropped first.
"""

import sys
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from extproc.base.errors import RequestError
from extproc.tokenizing.tokenizer_layout import Cutter
from kvstate.overlap import Tokens

# Length of the longest beginning that has a key.
_MAX_CHARACTERS = 8 * 1024 * 1024

# The first beginnings with keys; then the distance to the next: this many characters, or the length
# so far divided by this share if that is more.
_FIRST_STEPS = (256, 512)
_STEP_CHARACTERS = 1_024
_STEP_SHARE = 32

# How much of the end of each is hashed; hashing all of it would cost more than everything else.
_SAMPLE_CHARACTERS = 64

# Memory besides text and ids (measured): for an entry, a key, a cut.
_ENTRY_BYTES = 300
_KEY_BYTES = 180
_CUT_BYTES = 150

# Memory for a model's texts and their ids: enough for hundreds of conversations of 32k tokens each.
# What is known by turns has a quarter of a model's 256 MiB (`plain_turns`).
MAX_KNOWN_BYTES = 192 * 1024 * 1024

# One text may take at most the memory divided by this.
_LARGEST_SHARE = 4


def _steps() -> Iterator[int]:
    """Yields the lengths of beginnings that have keys."""
    yield from _FIRST_STEPS
    end = _STEP_CHARACTERS
    while end <= _MAX_CHARACTERS:
        yield end
        end += max(_STEP_CHARACTERS, end // _STEP_SHARE)


_ENDS = tuple(_steps())


class Cut(msgspec.Struct, frozen=True, gc=False):
    """A position where a text can be cut: both parts have the same ids as in the whole.

    start, end: characters of the token after the cut; the cut is valid only with it. tokens: how
    many ids come before the cut.
    """

    start: int
    end: int
    tokens: int


class _Entry(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One text. keys: of its beginnings. Not tracked by the garbage collector, like its cuts."""

    text: str
    ids: Tokens
    cuts: tuple[Cut, ...]
    keys: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Its memory in bytes, including its share of the lookup structures."""
        return (
            sys.getsizeof(self.text)
            + sys.getsizeof(self.ids)
            + _ENTRY_BYTES
            + _KEY_BYTES * len(self.keys)
            + _CUT_BYTES * len(self.cuts)
        )

    def shared_cuts(self, text: str) -> Sequence[Cut]:
        """Returns the cuts within the common beginning with another text."""
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


class TextRecord(msgspec.Struct, frozen=True, gc=False):
    """What is known about a text.

    ids: those of a text with the same beginning; valid up to the last cut, or all if `is_whole`.
        They must not be changed: other requests share them.
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
        """The character at which the unknown part begins."""
        return self.cuts[-1].start if self.cuts else 0


class KnownTexts:
    """The texts of one tokenizer. Not safe to use from several threads at once.

    max_bytes: limit for texts, ids and lookup structures.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._entries: OrderedDict[_Entry, None] = OrderedDict()
        self._by_beginning: dict[int, _Entry] = {}

    @property
    def size_bytes(self) -> int:
        """The bytes in use, of `max_bytes`."""
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, text: str) -> TextRecord:
        """Returns what is known about a text: no ids and no cuts if it is unknown."""
        keys = _keys(text)
        entry = self._alike(keys)
        if entry is None:
            return TextRecord(array("I"), (), is_whole=False, keys=keys, like=None)
        self._entries.move_to_end(entry)
        if entry.text == text:
            return TextRecord(entry.ids, entry.cuts, is_whole=True, keys=keys, like=entry)
        return TextRecord(entry.ids, entry.shared_cuts(text), is_whole=False, keys=keys, like=entry)

    def remember(self, text: str, known: TextRecord, ids: Tokens, cuts: Sequence[Cut]) -> None:
        """Keeps a text with all its ids and cuts, in order.

        It replaces the earlier text with the same beginning, if it has all of that text's cuts.

        known: the result of `find`.
        """
        entry = _Entry(text, ids, tuple(cuts), known.keys)
        if not known.keys or entry.size_bytes > self._max_bytes // _LARGEST_SHARE:
            return
        twin = self._by_beginning.get(known.keys[-1])  # remembered by another thread meanwhile
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
        """Returns the latest entry that shares the longest beginning with a key, or None."""
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
    """Returns a hash of every beginning, from its last characters and the previous hash."""
    key, keys = 0, []
    for end in _ENDS[: bisect_right(_ENDS, len(text))]:
        key = hash((key, text[end - _SAMPLE_CHARACTERS : end]))
        keys.append(key)
    return tuple(keys)


class Encoder(Protocol):
    """Tokenizes whole texts; safe to use from several threads.

    name: the library's name and version.
    inline_characters: this much prose takes under a millisecond, and any text under three.
    max_characters: this much of the worst text takes a thread a second or two.
    forgotten_characters: tokenizing this much again is cheaper than remembering it.
    """

    name: str
    inline_characters: int
    max_characters: int
    forgotten_characters: int

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the ids of each text, without what add_special_tokens adds.

        Raises:
            RequestError: a text has a lone surrogate, from a JSON escape (not_unicode), or the
                library fails (tokenizer_failed).
        """


class EncodedText(msgspec.Struct, frozen=True, gc=False):
    """The ids of a text, which must not be changed.

    lasting: how many of the first ids stay the same however the text continues.
    """

    ids: Tokens
    lasting: int


class StartedText(msgspec.Struct, frozen=True, gc=False):
    """A text that was looked up, but not tokenized yet.

    new_from: the character at which the unknown part begins. new_characters: how many must be
    tokenized.
    """

    text: str
    record: TextRecord
    new_from: int
    new_characters: int


# A cache for the last parts of texts, usually the end of a chat template: these are few and short.
MAX_ENDING_CHARACTERS = 128
MAX_ENDINGS = 64


class TextEncoder:
    """Encodes texts with one encoder, and remembers them. Safe to use from several threads.

    cutter: None if texts cannot be cut; then only a repeated text is known.
    max_known_bytes: memory for known texts.
    """

    def __init__(self, encoder: Encoder, cutter: Cutter | None, max_known_bytes: int) -> None:
        self.encoder = encoder
        self.cutter = cutter
        self._records = KnownTexts(max_known_bytes)
        self._endings: dict[str, Tokens] = {}
        self._lock = threading.Lock()

    def is_cheap(self, new_characters: int) -> bool:
        """Returns whether this many new characters are tokenized without a thread."""
        return new_characters <= self.encoder.inline_characters

    def begin(self, text: str) -> StartedText:
        """Returns the work that a text needs, in about a third of a microsecond per kilobyte."""
        with self._lock:
            known = self._records.find(text)
        new_from = known.new_from
        return StartedText(text, known, new_from, 0 if known.is_whole else len(text) - new_from)

    def finish(self, work: StartedText) -> EncodedText:
        """Tokenizes the new part of a text, remembers the whole, and returns its ids.

        Raises:
            RequestError: there is too much new text (too_many_new_characters), or it cannot be
                tokenized.
        """
        text, known, new_from = work.text, work.record, work.new_from
        if known.is_whole:
            return _encoded(known.ids, known.cuts)
        if work.new_characters > self.encoder.max_characters:
            raise RequestError("too_many_new_characters")
        spans = self.cutter.find(text, new_from) if self.cutter else []
        edges = [new_from, *[start for start, _ in spans], len(text)]
        parts = self._ids([text[start:end] for start, end in pairwise(edges)])
        cuts = list(known.cuts)
        ids = known.ids[: cuts[-1].tokens] if cuts else array("I")
        ids.extend(parts[0])
        for (start, end), part in zip(spans, parts[1:], strict=True):
            cuts.append(Cut(start, end, len(ids)))
            ids.extend(part)
        if not known.cuts or work.new_characters > self.encoder.forgotten_characters:
            with self._lock:
                self._records.remember(text, known, ids, cuts)
        return _encoded(ids, cuts)

    def _ids(self, parts: Sequence[str]) -> list[Tokens]:
        """Returns the ids of each part, which must not be changed: the last ones may be cached."""
        ending = parts[-1]
        known = self._endings.get(ending)
        if known is not None:
            return [*self.encoder.ids(parts[:-1]), known] if len(parts) > 1 else [known]
        ids = self.encoder.ids(parts)
        if len(parts) > 1 and len(ending) <= MAX_ENDING_CHARACTERS:
            if len(self._endings) >= MAX_ENDINGS:
                self._endings.clear()
            self._endings[ending] = ids[-1]
        return ids


def _encoded(ids: Tokens, cuts: Sequence[Cut]) -> EncodedText:
    return EncodedText(ids, cuts[-1].tokens if cuts else 0)
