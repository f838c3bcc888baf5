"""The loop time that the feeds of one worker may use."""

import math

# The most loop time that the feeds of one worker may use, in seconds per second, and in one burst:
# a start with vLLM's full buffer takes 1.3 s. Reading messages, and decoding those of gRPC, is not
# included.
SHARE_OF_LOOP = 0.2
BURST_SECONDS = 4.0
# The most time that a worker can owe: after an hour's stop of the process, it must not wait five.
MAX_DEBT_SECONDS = 0.1
# A worker that used up its time waits until it has this much again; otherwise it would wait for
# every message.
RESUME_SECONDS = 0.01
# A worker is behind with its events if it had less than CALM_SECONDS left for BEHIND_SECONDS.
CALM_SECONDS = 0.1
BEHIND_SECONDS = 2.0


class Allowance:
    """The loop time that the feeds of one worker may use: a token bucket of seconds.

    A worker that sends too many events is read later, with all its ranks; its messages wait in its
    socket, then in the publisher. now: the loop's time, in seconds.
    burst_seconds, behind_seconds: see `BURST_SECONDS` and `BEHIND_SECONDS`.
    """

    def __init__(
        self,
        now: float,
        burst_seconds: float = BURST_SECONDS,
        behind_seconds: float = BEHIND_SECONDS,
    ) -> None:
        self._burst_seconds = burst_seconds
        self._behind_seconds = behind_seconds
        self._remaining_seconds = burst_seconds
        self._filled_at = now
        self._restless_since = math.inf

    def spend(self, seconds: float, now: float) -> None:
        """Removes this many seconds from it."""
        self._remaining_seconds -= seconds
        if self._remaining_seconds > 0:
            return  # the usual case: it is refilled only when needed
        self._fill(now)
        if self._remaining_seconds <= 0:
            self._remaining_seconds = max(self._remaining_seconds, -MAX_DEBT_SECONDS)
            self._restless_since = min(self._restless_since, now)

    def wait_seconds(self, now: float) -> float:
        """Returns the seconds to wait before the next event; 0 if time is left, as is usual."""
        if self._remaining_seconds > 0:
            return 0.0
        self._fill(now)
        missing = RESUME_SECONDS - self._remaining_seconds
        return missing / SHARE_OF_LOOP if self._remaining_seconds <= 0 else 0.0

    def is_behind(self, now: float) -> bool:
        """Whether so little was left for so long that the state held is outdated."""
        if self._restless_since == math.inf:
            return False
        self._fill(now)
        return now - self._restless_since >= self._behind_seconds

    def _fill(self, now: float) -> None:
        filled = self._remaining_seconds + (now - self._filled_at) * SHARE_OF_LOOP
        self._remaining_seconds = min(filled, self._burst_seconds)
        self._filled_at = now
        if self._remaining_seconds >= CALM_SECONDS:
            self._restless_since = math.inf
