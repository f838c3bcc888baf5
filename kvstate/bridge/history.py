"""The numbered batches of one rank that can still be had, and from which number on.

Numbers ascend by one and never depend on who listens. They begin at a number that no earlier run
of the bridge has reached, so a cursor of an earlier run is never taken for one of this. A hole
takes a number of its own, so no cursor from before it can be followed up.
"""

from collections import deque

from kvstate.wire.grpc_encoding import Head, encode_head


class History:
    """One rank's batches.

    first: the number of the first batch. timestamp: of the last batch, in seconds by the engine's
    clock; of the start before there is one. At most `max_batches` and `max_bytes` are kept, oldest
    dropped first; one batch is kept whatever its size.
    """

    def __init__(
        self, rank: int, first: int, timestamp: float, *, max_batches: int, max_bytes: int
    ) -> None:
        self.rank = rank
        self.next = first
        self.holes = 0
        self.timestamp = timestamp
        self.size_bytes = 0
        self._resumable = first
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last(self) -> int:
        """Number of the last batch, or of the hole behind which none has come yet."""
        return self.next - 1

    @property
    def oldest(self) -> int:
        """Number of the oldest batch that is kept, `next` if there is none."""
        return self.next - len(self._batches)

    @property
    def resumable(self) -> int:
        """The lowest number at which a subscriber may go on."""
        return max(self.oldest, self._resumable)

    def append(self, entries: list[bytes], timestamp: float) -> None:
        """Gives these entries the next number, as one batch."""
        batch = encode_head(Head(self.next, timestamp, self.rank)) + b"".join(entries)
        self.next += 1
        self.timestamp = timestamp
        self._batches.append(batch)
        self.size_bytes += len(batch)
        while len(self._batches) > 1 and self._is_over_limit():
            self.size_bytes -= len(self._batches.popleft())

    def batch(self, number: int) -> bytes:
        """A batch that is kept."""
        return self._batches[number - self.oldest]

    def hole(self) -> None:
        """Batches were lost here: what came before leads nowhere."""
        self.holes += 1
        self.next += 1
        self._batches.clear()
        self.size_bytes = 0

    def close_past(self) -> None:
        """Lets nobody go on at a number up to the last one.

        A snapshot in several pieces bears numbers of batches. Who lost the connection within it
        would take those batches for the rest of the snapshot.
        """
        self._resumable = self.next

    def _is_over_limit(self) -> bool:
        return len(self._batches) > self._max_batches or self.size_bytes > self._max_bytes
