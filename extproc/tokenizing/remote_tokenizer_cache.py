"""Answers of the workers' tokenizers, kept for prompts that come again. Bounded in bytes."""

import hashlib
from collections import OrderedDict

from kvstate.events import Tokens

# What Python needs besides the ids, measured: an entry, its key, an array.
_ENTRY_BYTES = 260


def key_of(question: bytes) -> bytes:
    """What a question is known by. Clients choose the text, so no two may have the same."""
    return hashlib.blake2b(question, digest_size=16).digest()


class TokenCache:
    """Token ids by question; the one asked for least recently goes first.

    limit_bytes: of all; 0 keeps nothing.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, Tokens] = OrderedDict()
        self.bytes = 0

    def find(self, key: bytes) -> Tokens | None:
        """The ids, not to be changed; None if they are not known."""
        tokens = self._entries.get(key)
        if tokens is not None:
            self._entries.move_to_end(key)
        return tokens

    def keep(self, key: bytes, tokens: Tokens) -> None:
        """Keeps an answer, at the price of older ones."""
        size = _size(tokens)
        if size > self._limit_bytes or key in self._entries:
            return
        self._entries[key] = tokens
        self.bytes += size
        while self.bytes > self._limit_bytes:
            _, lost = self._entries.popitem(last=False)
            self.bytes -= _size(lost)


def _size(tokens: Tokens) -> int:
    return _ENTRY_BYTES + len(tokens) * tokens.itemsize
