"""The limit: which share of the caches live conversations may fill before others wait.

It is learned, since what a conversation needs is estimated, and depends on how it is used: while
much of what live conversations hold is evicted and computed again, the limit falls below what they
fill now; while little is, it rises as long as somebody waits.
"""

from math import exp, inf

# Of the prompt tokens of conversations that live, this share may be computed again because it was
# evicted. Below it the limit rises, above it the limit falls.
EVICTED_SHARE = 0.15

# How fast earlier requests are forgotten, and how often the limit changes, in seconds.
MEMORY_SECONDS = 30.0
STEP_SECONDS = 5.0

# By how much it falls in one step, and rises at most: while nothing is evicted.
FALL, RISE = 0.97, 0.04

# It never falls below this: what is evicted while live conversations fill less is not evicted for
# lack of room, and whoever waited would wait in vain. Nor could it rise from 0 again.
LEAST_SHARE = 0.5


class Limit:
    """The learned limit of one model's caches. share: may be infinite: nobody waits.

    Times are seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self.share = inf
        self._prompts = self._evicted = 0.0
        self._noted_at = self._stepped_at = 0.0

    def note(self, prompt_tokens: float, evicted_tokens: float, now: float) -> None:
        """Notes a request, and how much of its conversation was evicted."""
        kept = exp((self._noted_at - now) / MEMORY_SECONDS)
        self._prompts = self._prompts * kept + prompt_tokens
        self._evicted = self._evicted * kept + evicted_tokens
        self._noted_at = now

    @property
    def evicted_share(self) -> float:
        """Returns the share of the prompt tokens that were evicted, of late."""
        return self._evicted / self._prompts if self._prompts else 0.0

    def step(self, filled: float, now: float, *, is_awaited: bool) -> None:
        """Changes the limit if it is time. filled: the share that is filled now.

        is_awaited: whether somebody waits.
        """
        if now - self._stepped_at < STEP_SECONDS:
            return
        self._stepped_at = now
        if self.evicted_share > EVICTED_SHARE:
            self.share = max(LEAST_SHARE, min(self.share, filled) * FALL)
        elif is_awaited:
            self.share *= 1.0 + RISE * (1.0 - self.evicted_share / EVICTED_SHARE)
        elif self.share < filled:
            self.share = filled
