"""Live batches that are kept back while a replay runs, in order, and bounded."""

from collections import deque
from collections.abc import Iterable
from typing import Generic

from kvstate.feeds.feed_terms import Body, Numbered

# Live batches kept back while a replay runs. Where one does not fit, the oldest is dropped: the gap
# then lies before what is held, and the end of the replay asks for it.
MAX_HELD_BATCHES = 4096
MAX_HELD_BYTES = 64 * 1024 * 1024


class Held(Generic[Body]):
    """The batches kept back."""

    def __init__(self) -> None:
        self._batches: deque[Numbered[Body]] = deque()
        self._bytes = 0

    @property
    def first_sequence(self) -> int | None:
        """Number of the oldest one."""
        return self._batches[0].sequence if self._batches else None

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, batch: Numbered[Body]) -> None:
        """Keeps one more; the newest stays whatever its size."""
        self._batches.append(batch)
        self._bytes += batch.size_bytes
        while len(self._batches) > 1 and self._is_over_limit():
            self._bytes -= self._batches.popleft().size_bytes

    def extend(self, batches: Iterable[Numbered[Body]]) -> None:
        """Keeps several more."""
        for batch in batches:
            self.append(batch)

    def take_all(self) -> list[Numbered[Body]]:
        """All of them, oldest first; none is kept any more."""
        taken = list(self._batches)
        self.clear()
        return taken

    def clear(self) -> None:
        """Drops all of them."""
        self._batches.clear()
        self._bytes = 0

    def _is_over_limit(self) -> bool:
        return len(self._batches) > MAX_HELD_BATCHES or self._bytes > MAX_HELD_BYTES
