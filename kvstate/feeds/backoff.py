"""How long to wait before the next try: twice as long each time, with jitter, up to a limit."""

from collections.abc import Callable


class Backoff:
    """Waits between tries at one thing.

    chance: 0 to 1, evenly; a wait is between half and one and a half of its nominal length, so
    that many who failed together do not come back together.
    """

    def __init__(
        self, first_seconds: float, limit_seconds: float, chance: Callable[[], float]
    ) -> None:
        self._first_seconds = first_seconds
        self._limit_seconds = limit_seconds
        self._chance = chance
        self._nominal_seconds = first_seconds

    def next_seconds(self) -> float:
        """The wait before the next try."""
        seconds = self._nominal_seconds * (0.5 + self._chance())
        self._nominal_seconds = min(2 * self._nominal_seconds, self._limit_seconds)
        return seconds

    def reset(self) -> None:
        """A try succeeded."""
        self._nominal_seconds = self._first_seconds
