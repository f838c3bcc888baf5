"""Whether a router is ready, and if not, why."""

import time
from collections.abc import Callable

from extproc.running.processes import ProcessMember

STARTING = "starting: the ext_proc server does not listen yet"
STOPPING = "stopping: open streams may finish, new ones are not accepted"


class Readiness:
    """Ready once ext_proc listens and all workers' caches are known, or after a deadline.

    Never ready while stopping.

    is_listening: set once the ext_proc server listens. is_stopping: set when the router is about to
    stop. awaited: returns what is still missing, in words; "" if nothing is.
    deadline_seconds: counted from now. monotonic: a clock in seconds.
    """

    def __init__(
        self,
        awaited: Callable[[], str],
        deadline_seconds: float,
        monotonic: Callable[[], float],
    ) -> None:
        self.is_listening = False
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
        if not self.is_listening:
            return STARTING
        return "" if self._monotonic() >= self._deadline else self._awaited()


def with_others(own: Readiness, member: ProcessMember, seconds: float) -> Readiness:
    """Returns a readiness that waits for all other processes too, for at most so many seconds."""
    return Readiness(lambda: own.hindrance() or member.hindrance(), seconds, time.monotonic)
