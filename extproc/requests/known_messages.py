"""Messages by the bytes that were sent, each of which is read once.

A client sends the whole conversation with each turn. Messages that are known are neither decoded
nor converted again. Memory is bounded in bytes: two generations are kept; when the younger one is
full, the older one is dropped.
"""

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

Parsed = TypeVar("Parsed")


def memory_of(written: bytes) -> int:
    """Returns how many bytes values of JSON take at most, decoded and converted.

    written: with a comma between them.
    """
    values, text_bytes = sizes(written)
    return 2 * (text_bytes + _VALUE_BYTES * (1 + values))


class KnownMessages(Generic[Parsed]):
    """The messages of an API, by their bytes.

    Several threads may use it at once: at worst, the bytes of some messages are not counted.

    read: reads one. What it returns serves several requests, and must not be changed. more_of:
    returns how many bytes such messages take besides the decoded ones.
    """

    def __init__(
        self,
        read: Callable[[bytes], Parsed],
        more_of: Callable[[Sequence[Parsed]], int] = lambda _: 0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._read, self._more_of = read, more_of
        self._most = max_bytes // 2
        self._young: dict[bytes, Parsed] = {}
        self._old: dict[bytes, Parsed] = {}
        self._young_bytes = 0

    def read(self, messages: Sequence[msgspec.Raw]) -> list[Parsed]:
        """Returns what was read of each message.

        Raises:
            Whatever reading does; then no new message is kept.
        """
        written = list(map(bytes, messages))
        found = list(map(self._young.get, written))
        if None not in found:
            return found  # type: ignore[return-value] # none is missing
        return self._completed(written, found)

    def _completed(self, written: list[bytes], found: Sequence[Parsed | None]) -> list[Parsed]:
        """Returns all messages, and keeps those that the younger generation does not have."""
        old, read = self._old.get, self._read
        new: dict[bytes, Parsed] = {}
        whole = []
        for raw, known in zip(written, found, strict=True):
            one = known
            if one is None:
                one = old(raw)
                new[raw] = one = read(raw) if one is None else one
            whole.append(one)
        self._keep(new)
        return whole

    def _keep(self, new: dict[bytes, Parsed]) -> None:
        all_written = b",".join(new)
        size = len(all_written) + memory_of(all_written) + _ENTRY_BYTES * len(new)
        size += self._more_of([*new.values()])
        if self._young_bytes + size > self._most:
            self._old, self._young, self._young_bytes = self._young, {}, 0
        if size <= self._most:
            self._young.update(new)
            self._young_bytes += size
