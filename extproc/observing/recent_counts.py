"""Counts of the last minutes."""

from collections import Counter
from collections.abc import Mapping
from typing import Generic, TypeVar

# How long something counts as recent.
MINUTE_SECONDS = 60.0
RECENT_MINUTES = 15

Key = TypeVar("Key")


class RecentCounts(Generic[Key]):
    """Counts by minutes. Times are seconds of one monotonic clock, and never go back by one."""

    def __init__(self) -> None:
        self._minutes: dict[int, Counter[Key]] = {}

    def add(self, counts: Mapping[Key, int], at: float) -> None:
        """Counts what happened at a time."""
        self._minutes.setdefault(int(at // MINUTE_SECONDS), Counter()).update(counts)
        self._forget(max(self._minutes))

    def total(self, now: float) -> Counter[Key]:
        """Returns the counts of the last RECENT_MINUTES, the present one among them."""
        self._forget(int(now // MINUTE_SECONDS))
        return sum(self._minutes.values(), Counter[Key]())

    def _forget(self, minute: int) -> None:
        for old in [one for one in self._minutes if one <= minute - RECENT_MINUTES]:
            del self._minutes[old]
