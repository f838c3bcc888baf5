"""The table of media items: what each is to the engines, as their events said.

An item is known by a key of its model, adapter, processor arguments and digest. The least recently
used are forgotten beyond a number of bytes.
"""

from array import array
from collections import deque

import msgspec

from kvstate.media import FIRST_PAD, Identifier, RunIds, ids_in, runs_of, tokens_in
from kvstate.overlap import Tokens

# Memory of all entries, by estimate.
MAX_BYTES = 32 * 1024 * 1024
_ENTRY_BYTES, _RUN_BYTES = 400, 120

# More tokens than any item has, and more runs of equal ids: an item in rows has two for each row.
MAX_TOKENS = 262_144
MAX_RUNS = 1_024

# How many uses are noted until the next item is learned; of more, the latest.
MOST_USED = 4_096

# Longer names of items are not kept; engines' hashes have 64 letters.
MAX_IDENTIFIER_LETTERS = 512


class Identity(msgspec.Struct, frozen=True, gc=False):
    """What an item is to the engines.

    identifier: the engine's name of it, None if its ids tell what it is. runs: the ids that stand
    for it, in place of what the template writes, with how many tokens they have in a row. lead: how
    many of them are before those that the identifier covers. is_whole: whether these are all; if
    not, the item goes on.
    """

    identifier: Identifier | None
    runs: tuple[tuple[RunIds, int], ...]
    lead: int = 0
    is_whole: bool = True

    @classmethod
    def of(
        cls, identifier: Identifier | None, tokens: Tokens, lead: int, *, is_whole: bool
    ) -> "Identity | None":
        """Returns the identity of an item with these ids; None if it is larger than any item."""
        if not 0 < len(tokens) <= MAX_TOKENS:
            return None
        runs = tuple(runs_of(tokens))
        if len(runs) > MAX_RUNS:
            return None
        if isinstance(identifier, str | bytes) and len(identifier) > MAX_IDENTIFIER_LETTERS:
            return None
        return cls(identifier, runs, lead, is_whole)

    @property
    def name(self) -> object:
        """What tells it from other items: the engine's name, or else the first of its own ids."""
        if self.identifier is not None:
            return self.identifier
        first = [token for ids, _ in self.runs for token in ids_in(ids)]
        return next((token for token in first if token >= FIRST_PAD), first[0])

    @property
    def count(self) -> int:
        """How many tokens it has, as far as is known."""
        return sum([count for _, count in self.runs])

    @property
    def tokens(self) -> Tokens:
        """Its ids."""
        ids = array("I")
        for one, count in self.runs:
            ids.extend(tokens_in(one, count))
        return ids

    @property
    def next_token(self) -> int:
        """The id with which it goes on if it is not whole."""
        ids, count = self.runs[-1]
        return ids_in(ids)[count % len(ids_in(ids))]

    @property
    def size_bytes(self) -> int:
        """Its memory in the table, by estimate."""
        return _ENTRY_BYTES + _RUN_BYTES * sum([len(ids_in(ids)) for ids, _ in self.runs])


class Identities:
    """The identities of items, by keys of 16 bytes. max_bytes: of its memory.

    Any thread may look items up; only one changes what is known.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._by_key: dict[bytes, Identity] = {}
        self._used: deque[bytes] = deque(maxlen=MOST_USED)

    def __len__(self) -> int:
        """Returns how many items are known."""
        return len(self._by_key)

    @property
    def size_bytes(self) -> int:
        """Its memory, by estimate."""
        return self._size_bytes

    def find(self, key: bytes) -> Identity | None:
        """Returns an item's identity, None if it is not known; it is the latest used then."""
        found = self._by_key.get(key)
        if found is not None:
            self._used.append(key)
        return found

    def put(self, key: bytes, identity: Identity) -> None:
        """Keeps an item's identity instead of what was known of it."""
        self._reorder()
        self.drop(key)
        self._by_key[key] = identity
        self._size_bytes += identity.size_bytes
        while self._size_bytes > self._max_bytes:
            self.drop(next(iter(self._by_key)))

    def drop(self, key: bytes) -> None:
        """Forgets an item."""
        before = self._by_key.pop(key, None)
        if before is not None:
            self._size_bytes -= before.size_bytes

    def _reorder(self) -> None:
        """Puts the items that were used since the last time behind the others."""
        while self._used:
            used = self._used.popleft()
            found = self._by_key.pop(used, None)
            if found is not None:
                self._by_key[used] = found

    def ordered_keys(self) -> list[bytes]:
        """Returns the keys of all items, the latest used last."""
        self._reorder()
        return list(self._by_key)

    def look_at(self, key: bytes) -> Identity | None:
        """Returns the same as `find`; the item is not used thereby."""
        return self._by_key.get(key)

    def items(self) -> list[tuple[bytes, Identity]]:
        """Returns all items, the latest used last."""
        self._reorder()
        return list(self._by_key.items())
