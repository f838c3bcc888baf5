"""What a feed remembers of the batches of its publisher, to recognize them and its restart.

A batch is identified by its number and its time stamp: two batches of one publisher, or of two,
never have both in common.

The stamps of the last batches are kept, and a sample of the earlier ones: those whose number is a
multiple of a stride, which doubles whenever the sample is full. So a publisher that repeats itself
is distinguished from another one that counts through the same numbers, however long ago that was.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

# Stamps kept of the last batches: duplicates come from a replay that overtakes the live stream, so
# they are at most as old as the replay.
MAX_STAMPS = 4096
# Stamps kept of earlier batches.
MAX_SAMPLED = 1024

# Batches with rising numbers, all lower than expected and never received before, that are taken
# for a restart of the publisher.
STRANGE_BATCHES = 3


class Stamps:
    """The stamps of the batches taken from one publisher, by number; numbers only rise.

    max_last, max_sampled: how many are kept of the last batches, and of earlier ones.
    """

    def __init__(self, max_last: int = MAX_STAMPS, max_sampled: int = MAX_SAMPLED) -> None:
        self._max_last = max_last
        self._max_sampled = max_sampled
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self._last: OrderedDict[int, float] = OrderedDict()
        self._sampled: dict[int, float] = {}
        self._stride = 1
        self._first: int | None = None
        self._newest = -math.inf

    def __len__(self) -> int:
        return len(self._last) + len(self._sampled)

    def note(self, number: int, stamp: float) -> None:
        """Remembers a batch that was taken."""
        if self._first is None:
            self._first = number
        self._newest = max(self._newest, stamp)
        self._last[number] = stamp
        if len(self._last) > self._max_last:
            self._sample(*self._last.popitem(last=False))

    def get(self, number: int) -> float | None:
        """Returns the stamp of the batch with this number, None if it is not remembered."""
        stamp = self._last.get(number)
        return self._sampled.get(number) if stamp is None else stamp

    def is_other(self, number: int, stamp: float) -> bool:
        """Whether this batch is certainly of another publisher.

        The batch with this number had another stamp, or this stamp is newer than that of every
        batch taken. A repeated batch is neither, whatever the publisher's clock did.
        """
        known = self.get(number)
        return stamp > self._newest if known is None else known != stamp

    def was_never_taken(self, number: int) -> bool:
        """Whether no batch with this number can have been taken; False also if this is unknown."""
        if self._first is None or number < self._first:
            return True
        is_kept = number % self._stride == 0 or number >= next(iter(self._last))
        return is_kept and self.get(number) is None

    def last(self, most: int) -> tuple[tuple[int, float], ...]:
        """Returns at most so many of the last batches, in order of their numbers."""
        return tuple(islice(reversed(self._last.items()), most))[::-1]

    @property
    def newest(self) -> float:
        """The newest stamp of all batches taken."""
        return self._newest

    def restore(self, last: Iterable[tuple[int, float]], newest: float) -> None:
        """Replaces what is remembered by what `last` and `newest` returned.

        Earlier batches count as never taken: if some come again, the publisher is asked for proof.
        """
        self.clear()
        self._last.update(last)
        self._first = next(iter(self._last), None)
        self._newest = newest

    def _sample(self, number: int, stamp: float) -> None:
        if number % self._stride:
            return
        self._sampled[number] = stamp
        while len(self._sampled) > self._max_sampled:
            self._stride *= 2
            kept = self._sampled.items()
            self._sampled = {one: its for one, its in kept if one % self._stride == 0}


class Doubt:
    """Batches that came with lower numbers than expected, and were never received before.

    The publisher may have restarted, on a host whose clock is behind.
    """

    def __init__(self) -> None:
        self.is_asked = False  # whether the publisher was asked about it
        self.is_unanswered = False  # and did not answer
        self._expected = -1
        self._last = -1
        self._count = 0

    def note(self, number: int, expected: int) -> bool:
        """Notes such a batch; returns whether several came, one after another.

        expected: the next number; if it is another one than before, the publisher went on, so that
        the earlier ones are not counted.
        """
        if expected != self._expected:
            self.is_asked = self.is_unanswered = False
            self._expected, self._last, self._count = expected, -1, 0
        if number > self._last:
            self._count += 1
        self._last = number
        if self._count < STRANGE_BATCHES:
            return False
        self._last, self._count = -1, 0
        return True
