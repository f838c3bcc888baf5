"""Whether the router is ready for requests."""

from collections.abc import Callable

STOPPING = "stopping: streams under way are ended, no new ones are taken"


class Readiness:
    """Ready once the workers have told what they hold, or had their time to; never when stopping.

    is_stopping: set when the router is about to end.
    awaited: what is still to come before the workers have told, in words; "" if nothing.
    deadline_seconds: from now on. monotonic: seconds.
    """

    def __init__(
        self,
        awaited: Callable[[], str],
        deadline_seconds: float,
        monotonic: Callable[[], float],
    ) -> None:
        self.is_stopping = False
        self._awaited = awaited
        self._monotonic = monotonic
        self._deadline = monotonic() + deadline_seconds

    def __call__(self) -> bool:
        """Whether it is ready now."""
        return not self.hindrance()

    def hindrance(self) -> str:
        """Why it is not ready now, in words; "" if it is."""
        if self.is_stopping:
            return STOPPING
        return "" if self._monotonic() >= self._deadline else self._awaited()
