"""Conversations: how many of them a worker had a request of lately.

A conversation that waits for its user or its tools is in flight nowhere, but its next turn will
come. So for a worker it is load to be expected, until it has been silent for a while.
"""

# A conversation counts until it has been silent for so many seconds, less one span at most.
SPAN_SECONDS = 15.0
SPANS = 8
LIVE_SECONDS = SPAN_SECONDS * SPANS


class Conversations:
    """Counts one worker's conversations by the span of time of each one's last request.

    Times are seconds of one monotonic clock. Every call takes the same time for any number.
    """

    __slots__ = ("_counts", "_latest")

    def __init__(self) -> None:
        self._counts = [0] * SPANS
        self._latest = 0

    def count(self, now: float) -> None:
        """Counts a conversation whose last request is the one of now."""
        span = _span(now)
        for passed in range(max(self._latest + 1, span - SPANS + 1), span + 1):
            self._counts[passed % SPANS] = 0
        self._latest = max(self._latest, span)
        self._counts[span % SPANS] += 1

    def forget(self, since: float) -> None:
        """Counts a conversation no longer, whose last request here was counted at a time."""
        span = _span(since)
        if span > self._latest - SPANS:
            self._counts[span % SPANS] -= 1

    def live(self, now: float) -> int:
        """Returns how many conversations count now."""
        oldest = _span(now) - SPANS + 1
        if oldest <= self._latest - SPANS + 1:
            return sum(self._counts)
        return sum([self._counts[span % SPANS] for span in range(oldest, self._latest + 1)])


def _span(time: float) -> int:
    return int(time // SPAN_SECONDS)
