"""How much of a router's time the messages of other routers may take, with its replies."""

import time
from collections.abc import Callable

WINDOW_SECONDS = 0.1

# Of each window; once so much is used, the next message waits for the next window.
MOST_SECONDS = 0.02

# What each byte that is sent in reply counts, for the channel and for those who hear it: so that a
# short message does not have 20 MB a second sent to all routers.
SECONDS_A_BYTE = 5e-9


class HearingTime:
    """The time that handling messages took in the present window.

    most_seconds: how much of a window it may take. ends_at: when the window ends. passed_seconds:
    elapsed time of the first messages of the window, worked_seconds: CPU time of those that came
    later, and what was sent. On a busy machine elapsed time is more than CPU time, but CPU time is
    slower to read.
    """

    def __init__(self, most_seconds: float = MOST_SECONDS) -> None:
        self.most_seconds = most_seconds
        self.ends_at = self.passed_seconds = self.worked_seconds = 0.0

    def spend(self, now: float, handle: Callable[[], None]) -> float:
        """Handles a message; returns how many seconds to pause before the next.

        now: seconds on any clock that does not go back.
        """
        if now >= self.ends_at:
            self.ends_at = now + WINDOW_SECONDS
            self.passed_seconds = self.worked_seconds = 0.0
        if self.passed_seconds <= self.most_seconds / 2:
            began_at = time.perf_counter()
            handle()
            self.passed_seconds += time.perf_counter() - began_at
        else:
            worked_before = time.thread_time()
            handle()
            self.worked_seconds += time.thread_time() - worked_before
        is_used = self.worked_seconds > self.most_seconds / 2
        return max(0.0, self.ends_at - now) if is_used else 0.0

    def note_sent(self, size: int) -> None:
        """Counts bytes that a message had this router send."""
        self.worked_seconds += size * SECONDS_A_BYTE
