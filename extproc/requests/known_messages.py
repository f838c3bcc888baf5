"""Messages by the bytes that were sent, each of which is read once.

A client sends the whole conversation with each turn. Messages that are known are neither decoded
nor converted again. Memory is bounded in bytes: two generations are kept; when the younger one is
full, the older one is dropped.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from kvstate.scan import sizes

# Memory of all messages of an API: two generations.
MAX_BYTES = 64 * 1024 * 1024

# The most memory that a value takes besides its text: a list or an object, with its name.
_VALUE_BYTES = 400

# What an entry takes besides what is written and read.
_ENTRY_BYTES = 300

Read = TypeVar("Read")


def memory_of(written: bytes) -> int:
    """Returns how many bytes a value of JSON takes at most, decoded and converted."""
    values, text_bytes = sizes(written)
    return 2 * (text_bytes + _VALUE_BYTES * (1 + values))


class KnownMessages(Generic[Read]):
    """The messages of an API, by their bytes. Safe to use from several threads.

    read: reads one. What it returns serves several requests, and must not be changed. more_of:
    returns how many bytes that takes besides the decoded message.
    """

    def __init__(
        self,
        read: Callable[[bytes], Read],
        more_of: Callable[[Read], int] = lambda _: 0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._read, self._more_of = read, more_of
        self._most = max_bytes // 2
        self._young: dict[bytes, Read] = {}
        self._old: dict[bytes, Read] = {}
        self._young_bytes = 0
        self._lock = threading.Lock()

    def read(self, messages: Sequence[msgspec.Raw]) -> list[Read]:
        """Returns what was read of each message.

        Raises:
            Whatever reading does; such a message is not kept.
        """
        written = list(map(bytes, messages))
        found = list(map(self._young.get, written))
        return [
            self._kept(raw) if known is None else known
            for raw, known in zip(written, found, strict=True)
        ]

    def _kept(self, written: bytes) -> Read:
        """Returns what is read of a message that the younger generation does not have."""
        read = self._old.get(written)
        if read is None:
            read = self._read(written)
        size = len(written) + memory_of(written) + self._more_of(read) + _ENTRY_BYTES
        with self._lock:
            if self._young_bytes + size > self._most:
                self._old, self._young, self._young_bytes = self._young, {}, 0
            if size <= self._most:
                self._young[written] = read
                self._young_bytes += size
        return read
