"""Exponential backoff with jitter, up to a limit."""

import math
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
        self.nominal_seconds = first_seconds

    def next_seconds(self) -> float:
        """Returns the wait before the next try."""
        seconds = self.nominal_seconds * (0.5 + self._chance())
        self.nominal_seconds = min(2 * self.nominal_seconds, self._limit_seconds)
        return seconds

    def reset(self) -> None:
        """Notes that a try succeeded."""
        self.nominal_seconds = self._first_seconds


class FailureWaits:
    """The waits after failures of something that works most of the time.

    They grow from failure to failure, and begin anew once it has worked for the longest wait.
    """

    def __init__(
        self, first_seconds: float, limit_seconds: float, chance: Callable[[], float]
    ) -> None:
        self._limit_seconds = limit_seconds
        self._backoff = Backoff(first_seconds, limit_seconds, chance)
        self._over_at = math.inf

    def again_at(self, now: float, *, worked: bool) -> float:
        """Returns when to go on after a failure now, in seconds of the same clock.

        worked: whether it had gone on after the last failure, and worked until this one.
        """
        if worked and now >= self._over_at:
            self._backoff.reset()
        again_at = now + self._backoff.next_seconds()
        self._over_at = again_at + self._limit_seconds
        return again_at
