"""Turns the turns of a conversation into ids, and tokenizes only the new ones.

Where it is known what a template writes around contents (`extproc.templates.skeletons`), and an
added token before each turn at which a text can be cut (`tokenizer_layout`), a prompt's ids are
those of its turns, one after the other. So every turn is tokenized once, whatever conversations it
is in. Memory is bounded in bytes: turns that were not asked for lately are dropped.
"""

import sys
import threading
from array import array
from collections.abc import Sequence

from extproc.base.errors import RequestError
from extproc.tokenizing.text_encoder import Encoder
from kvstate.overlap import Tokens

# Memory of an entry besides its text and ids (measured), and of all turns of a model.
_ENTRY_BYTES = 200
MAX_TURN_BYTES = 64 * 1024 * 1024


class TurnEncoder:
    """Encodes turns with one encoder, and remembers them. Safe to use from several threads.

    Two generations of turns are kept; when the younger one is full, the older one is dropped.
    """

    def __init__(self, encoder: Encoder, max_bytes: int = MAX_TURN_BYTES) -> None:
        self._encoder = encoder
        self._most = max_bytes // 2
        self._young: dict[str, Tokens] = {}
        self._old: dict[str, Tokens] = {}
        self._young_bytes = 0
        self._lock = threading.Lock()

    def find(self, turns: Sequence[str]) -> "FoundTurns":
        """Returns what is known of turns."""
        found: list[Tokens | None] = list(map(self._young.get, turns))
        new: list[int] = []
        at = -1
        for _ in range(found.count(None)):
            at = found.index(None, at + 1)
            known = self._old.get(turns[at])
            if known is None:
                new.append(at)
            else:
                found[at] = known
                self._keep(turns[at], known)
        return FoundTurns(turns, found, new)

    def is_cheap(self, new_characters: int) -> bool:
        """Returns whether this many new characters are tokenized without a thread."""
        return new_characters <= self._encoder.inline_characters

    def finish(self, found: "FoundTurns") -> Tokens:
        """Tokenizes the new turns, remembers them, and returns the ids of all.

        Raises:
            RequestError: there is too much new text (too_many_new_characters), or it cannot be
                tokenized.
        """
        if found.new_characters > self._encoder.max_characters:
            raise RequestError("too_many_new_characters")
        turns, ids = found.turns, found.ids
        made = self._encoder.ids([turns[at] for at in found.new]) if found.new else ()
        for at, one in zip(found.new, made, strict=True):
            ids[at] = one
            self._keep(turns[at], one)
        return array("I", b"".join(ids))  # type: ignore[arg-type] # none is missing now

    def _keep(self, turn: str, ids: Tokens) -> None:
        size = sys.getsizeof(turn) + sys.getsizeof(ids) + _ENTRY_BYTES
        with self._lock:
            if self._young_bytes + size > self._most:
                self._old, self._young, self._young_bytes = self._young, {}, 0
            if size <= self._most:
                self._young[turn] = ids
                self._young_bytes += size


class FoundTurns:
    """Turns that were looked up.

    ids: of each, None of a new one. new: the indices of those. new_characters: how many must be
    tokenized.
    """

    __slots__ = ("ids", "new", "new_characters", "turns")

    def __init__(self, turns: Sequence[str], ids: list[Tokens | None], new: Sequence[int]) -> None:
        self.turns = turns
        self.ids = ids
        self.new = new
        self.new_characters = sum([len(turns[at]) for at in new])
