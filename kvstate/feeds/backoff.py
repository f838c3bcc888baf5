"""Exponential backoff with jitter, up to a limit."""

from collections.abc import Callable


class Backoff:
    """Computes the waits between tries of one operation.

    chance: 0 to 1, uniformly distributed. A wait is between 0.5 and 1.5 times its nominal length,
    so that clients that failed together do not retry together.
    """

    def __init__(
        self, first_seconds: float, limit_seconds: float, chance: Callable[[], float]
    ) -> None:
        self._first_seconds = first_seconds
        self._limit_seconds = limit_seconds
        self._chance = chance
        self._nominal_seconds = first_seconds

    def next_seconds(self) -> float:
        """Returns the wait before the next try."""
        seconds = self._nominal_seconds * (0.5 + self._chance())
        self._nominal_seconds = min(2 * self._nominal_seconds, self._limit_seconds)
        return seconds

    def reset(self) -> None:
        """Notes that a try succeeded."""
        self._nominal_seconds = self._first_seconds
