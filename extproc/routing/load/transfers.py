"""Transfers: what other workers pull from one worker, how fast, and what is still under way.

A worker sends blocks at the speed of its network, to all that pull from it together. So a pull
waits for those before it, and the speed is that of the source. It is learned from the times at
which the feeds of idle workers announce the blocks that they pulled. Until then, and again some
minutes after the last one, it is that of the fleet's transfers; theirs is as configured until one
of them was measured. So a wrong configuration costs one slow pull, not one a source. Times are
seconds of one clock.
"""

from math import exp

# The weights of what is assumed: of one worker, in seconds of transfers; of all, in tokens, so few
# that one measurement outweighs it. How long measurements count.
PRIOR_SECONDS = 0.25
PRIOR_TOKENS = 500.0
FADE_SECONDS = 300.0

# A pull at a guessed speed is late so long after it was expected.
SLACK_SECONDS = 0.15

# Longer ones show that blocks were computed, or waited; and they count as no slower than this part
# of the configured speed.
MAX_MEASURED_SECONDS = 30.0
SLOWEST = 1 / 1_024


class _Measurements:
    """Measured transfers, the newer ones weighted more."""

    __slots__ = ("_measured_at", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._seconds = self._measured_at = 0.0

    def tokens(self, now: float) -> float:
        """Returns their weight, in tokens."""
        return self._weight(now) * self._tokens

    def speed(self, assumed: float, prior_tokens: float, now: float) -> float:
        """Returns their tokens per second. assumed: the speed of so many tokens before them."""
        weight = self._weight(now)
        tokens = prior_tokens + weight * self._tokens
        return tokens / (prior_tokens / assumed + weight * self._seconds)

    def add(self, tokens: float, seconds: float, now: float) -> None:
        """Adds a transfer."""
        weight = self._weight(now)
        self._tokens = weight * self._tokens + tokens
        self._seconds = weight * self._seconds + seconds
        self._measured_at = now

    def _weight(self, now: float) -> float:
        return exp(-max(0.0, now - self._measured_at) / FADE_SECONDS)


class FleetTransfers:
    """What the transfers of all workers say of those that were not measured."""

    __slots__ = ("_expected_at", "_given_up_at", "_measurements")

    def __init__(self) -> None:
        self._measurements = _Measurements()
        self._expected_at = self._given_up_at = 0.0

    def speed(self, configured: float, now: float) -> float:
        """Returns the tokens per second to assume of a worker. configured: before any transfer."""
        return self._measurements.speed(configured, PRIOR_TOKENS, now)

    def may_begin(self, now: float) -> bool:
        """Returns whether a pull may begin: not if the speed is a guess, and shows to be wrong."""
        is_late = self._expected_at < now < self._given_up_at
        return not is_late or self._is_known(now)

    def expect(self, seconds: float, now: float) -> None:
        """Notes that a pull begins now, will be measured, and is expected to take so long."""
        if now >= self._given_up_at and not self._is_known(now):
            self._expected_at = now + seconds + SLACK_SECONDS
            self._given_up_at = now + MAX_MEASURED_SECONDS

    def measure(self, tokens: float, seconds: float, now: float) -> None:
        """Notes that so many tokens arrived within so many seconds, waiting included."""
        self._measurements.add(tokens, seconds, now)
        self._given_up_at = now

    def _is_known(self, now: float) -> bool:
        return self._measurements.tokens(now) >= PRIOR_TOKENS


class Transfers:
    """The transfers from one worker.

    measured: how many were measured so far. sent_tokens: of all of them. In its methods, assumed is
    the speed of the fleet's transfers.
    """

    __slots__ = ("_free_at", "_measurements", "measured", "sent_tokens")

    def __init__(self) -> None:
        self._free_at = 0.0
        self._measurements = _Measurements()
        self.measured = 0
        self.sent_tokens = 0.0

    def speed(self, assumed: float, now: float) -> float:
        """Returns its tokens per second."""
        return self._measurements.speed(assumed, assumed * PRIOR_SECONDS, now)

    def queued_tokens(self, assumed: float, now: float) -> float:
        """Returns how many tokens are still under way to others, as far as is known."""
        return max(0.0, self._free_at - now) * self.speed(assumed, now)

    def begin(self, tokens: float, assumed: float, now: float) -> float:
        """Notes a transfer that begins now; returns its tokens and those that it waits for."""
        self.sent_tokens += tokens
        tokens_ahead = self.queued_tokens(assumed, now)
        self._free_at = max(self._free_at, now) + tokens / self.speed(assumed, now)
        return tokens_ahead + tokens

    def measure(self, tokens: float, seconds: float, now: float) -> None:
        """Notes that so many tokens arrived within so many seconds, waiting included."""
        self._measurements.add(tokens, seconds, now)
        self.measured += 1

    def as_json(self, assumed: float, now: float) -> dict[str, int]:
        """Returns what GET /workers shows."""
        return {
            "tokens_per_second": round(self.speed(assumed, now)),
            "measured": self.measured,
            "queued_tokens": round(self.queued_tokens(assumed, now)),
            "sent_tokens": round(self.sent_tokens),
        }


def counted_seconds(tokens: float, seconds: float, configured: float) -> float | None:
    """Returns as how long a transfer counts; None if its time shows no transfer."""
    if not 0.0 <= seconds <= MAX_MEASURED_SECONDS:
        return None
    least = PRIOR_SECONDS / 16  # else one that came at once would count as infinitely fast
    most = tokens / (configured * SLOWEST)
    return min(max(seconds, least), max(most, least))
