"""Whether the router is ready for requests."""

from collections.abc import Callable


class Readiness:
    """Ready once the workers have told what they hold, or had their time to; never when stopping.

    is_stopping: set when the router is about to end.
    is_caught_up: whether they have told. deadline_seconds: from now on. monotonic: seconds.
    """

    def __init__(
        self,
        is_caught_up: Callable[[], bool],
        deadline_seconds: float,
        monotonic: Callable[[], float],
    ) -> None:
        self.is_stopping = False
        self._is_caught_up = is_caught_up
        self._monotonic = monotonic
        self._deadline = monotonic() + deadline_seconds

    def __call__(self) -> bool:
        """Whether it is ready now."""
        if self.is_stopping:
            return False
        return self._is_caught_up() or self._monotonic() >= self._deadline
