"""The share of the tokens in a store that a worker really loads, from what its engine reports.

A store may answer slowly, hold another model's layout, or have lost what it did not tell of; and an
engine may load only whole chunks. So what was offered to a worker that got a request is compared
with the tokens that it reports as cached beyond its own. Both fade, so that a worker whose share is
low is tried again. Without measurements all is believed.
"""

from math import exp

# What is believed at first counts like this many offered tokens of which all were loaded.
PRIOR_TOKENS = 20_000.0

# After so long a measurement counts for 1/e.
FADING_SECONDS = 900.0

# The most that one request can count.
MOST_TOKENS = 100_000


class StoreShare:
    """What one worker loads of what its store offers. Times are seconds of one clock.

    offered, loaded: tokens, faded since the last of them was noted.
    """

    __slots__ = ("_noted_at", "loaded", "offered")

    def __init__(self) -> None:
        self.offered = self.loaded = self._noted_at = 0.0

    def note(self, offered: int, loaded: int, now: float) -> None:
        """Notes that a worker loaded so many of the tokens that the store had for it."""
        kept = self._kept(now)
        scale = min(1.0, MOST_TOKENS / max(1, offered))
        self.offered = self.offered * kept + max(0, offered) * scale
        self.loaded = self.loaded * kept + min(max(0, loaded), max(0, offered)) * scale
        self._noted_at = now

    def share(self, now: float) -> float:
        """Returns the share that it is expected to load now, 0 to 1."""
        kept = self._kept(now)
        return (self.loaded * kept + PRIOR_TOKENS) / (self.offered * kept + PRIOR_TOKENS)

    def as_json(self, now: float) -> dict[str, float]:
        """Returns what GET /workers shows."""
        kept = self._kept(now)
        return {
            "share": round(self.share(now), 3),
            "offered_tokens": round(self.offered * kept),
            "loaded_tokens": round(self.loaded * kept),
        }

    def _kept(self, now: float) -> float:
        return exp(-max(0.0, now - self._noted_at) / FADING_SECONDS)
