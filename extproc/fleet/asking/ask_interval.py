"""How often each worker is asked one regular question, and how long its answer is awaited."""

import contextlib
from collections.abc import Callable

from extproc.fleet.asking.polling import Question

# A later answer is out of date.
MAX_ANSWER_SECONDS = 2.0


class AskInterval:
    """When each worker is asked one question: once an interval, spread over it.

    chance: 0 to 1, for jitter. monotonic: seconds.
    """

    def __init__(
        self, interval_seconds: float, chance: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self.answer_seconds = min(MAX_ANSWER_SECONDS, interval_seconds)
        self._interval_seconds = interval_seconds
        self._chance = chance
        self._monotonic = monotonic

    def question(self, name: str) -> Question:
        """Returns a question that is asked once in this interval.

        Every worker has a place of its own, so that those that hang delay no other's answer. The
        fleet is asked over the whole interval, so few answers are awaited unless workers hang.
        """
        return Question(name, contextlib.nullcontext(), self._interval_seconds)

    def first_seconds(self) -> float:
        """Returns the seconds until a worker is asked the first time."""
        return self._interval_seconds * 0.5 * self._chance()

    def next_seconds(self, asked_at: float) -> float:
        """Returns the seconds until a worker that was asked then is asked again."""
        pause = self._interval_seconds * (0.9 + 0.2 * self._chance())
        return pause - (self._monotonic() - asked_at)
