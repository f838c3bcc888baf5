"""The live batches that a feed holds back while a replay runs."""

from collections import deque
from collections.abc import Iterable

from kvstate.events import Batch

MAX_HELD_BATCHES = 4096
MAX_HELD_BYTES = 64 * 1024 * 1024


class HeldBatches:
    """Live batches that are held back while a replay runs, in order and bounded.

    If one does not fit, the oldest is dropped: the gap is then before the held batches, and is
    requested at the end of the replay.
    """

    def __init__(
        self, max_batches: int = MAX_HELD_BATCHES, max_bytes: int = MAX_HELD_BYTES
    ) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[Batch] = deque()
        self._bytes = 0

    @property
    def first_sequence(self) -> int | None:
        """Number of the oldest one."""
        return self._batches[0].sequence if self._batches else None

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, batch: Batch) -> None:
        """Adds a batch and drops the oldest beyond the limits; the newest always stays."""
        self._batches.append(batch)
        self._bytes += batch.size_bytes
        while len(self._batches) > 1 and self._is_over_limit():
            self._bytes -= self._batches.popleft().size_bytes

    def extend(self, batches: Iterable[Batch]) -> None:
        """Adds several."""
        for batch in batches:
            self.append(batch)

    def take_all(self) -> list[Batch]:
        """Returns all of them, oldest first, and keeps none."""
        taken = list(self._batches)
        self.clear()
        return taken

    def clear(self) -> None:
        """Drops all of them."""
        self._batches.clear()
        self._bytes = 0

    def _is_over_limit(self) -> bool:
        return len(self._batches) > self._max_batches or self._bytes > self._max_bytes
