"""Transfers: what other workers pull from one worker, how fast, and what is still under way.

A worker sends blocks at the speed of its network, to all that pull from it together. So a pull
waits for those before it, and the speed is that of the source. It is learned from the times at
which the feeds of idle workers announce the blocks that they pulled; until then, and again some
minutes after the last one, it is as configured. Times are seconds of one clock.
"""

from math import exp

# The weight of the configured speed, in seconds of transfers; and how long measurements count.
PRIOR_SECONDS = 0.25
FADE_SECONDS = 300.0

# Longer ones show that blocks were computed, or waited; and they count as no slower than this part
# of the configured speed.
MAX_MEASURED_SECONDS = 30.0
SLOWEST = 1 / 1_024


class Transfers:
    """The transfers from one worker.

    measured: how many were measured so far. sent_tokens: of all of them.
    """

    __slots__ = ("_free_at", "_measured_at", "_seconds", "_tokens", "measured", "sent_tokens")

    def __init__(self) -> None:
        self._free_at = 0.0
        self._tokens = self._seconds = self._measured_at = 0.0
        self.measured = 0
        self.sent_tokens = 0.0

    def speed(self, configured: float, now: float) -> float:
        """Returns its tokens per second. configured: what is assumed of it."""
        kept = self._kept(now)
        tokens = configured * PRIOR_SECONDS + kept * self._tokens
        return tokens / (PRIOR_SECONDS + kept * self._seconds)

    def queued_tokens(self, configured: float, now: float) -> float:
        """Returns how many tokens are still under way to others, as far as is known."""
        return max(0.0, self._free_at - now) * self.speed(configured, now)

    def begin(self, tokens: float, configured: float, now: float) -> float:
        """Notes a transfer that begins now; returns its tokens and those that it waits for."""
        self.sent_tokens += tokens
        tokens_ahead = self.queued_tokens(configured, now)
        self._free_at = max(self._free_at, now) + tokens / self.speed(configured, now)
        return tokens_ahead + tokens

    def measure(self, tokens: float, seconds: float, configured: float, now: float) -> None:
        """Notes that so many tokens arrived within so many seconds, waiting included."""
        if not 0.0 <= seconds <= MAX_MEASURED_SECONDS:
            return
        least = PRIOR_SECONDS / 16  # else one that came at once would count as infinitely fast
        most = tokens / (configured * SLOWEST)
        kept = self._kept(now)
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + min(max(seconds, least), max(most, least))
        self._measured_at = now
        self.measured += 1

    def as_json(self, configured: float, now: float) -> dict[str, int]:
        """Returns what GET /workers shows."""
        return {
            "tokens_per_second": round(self.speed(configured, now)),
            "measured": self.measured,
            "queued_tokens": round(self.queued_tokens(configured, now)),
            "sent_tokens": round(self.sent_tokens),
        }

    def _kept(self, now: float) -> float:
        return exp(-max(0.0, now - self._measured_at) / FADE_SECONDS)
