"""Live contexts: what the conversations that live on a worker hold of its cache.

A conversation that waits for its user or its tools is in flight nowhere, but its next turn will
come, and finds its cache only if nothing evicted it. So for a worker it is load to be expected, and
cache that is taken, until the conversation has been silent for a while.
"""

import msgspec

# A conversation counts until it has been silent for so many seconds, less one span at most.
SPAN_SECONDS = 15.0
SPANS = 8
LIVE_SECONDS = SPAN_SECONDS * SPANS

# For so long it is remembered what conversations held until they returned, by minutes; who pauses
# for longer than the most counts as if he had not.
NEED_SECONDS = 900.0
MOST_PAUSE_SECONDS = 1_800.0
_MINUTE = 60.0

# Most prefixes of which one worker's conversations are known to share one.
MOST_SHARED = 64


class Context(msgspec.Struct, frozen=True, gc=False):
    """What one conversation holds of a cache, in tokens.

    own: those that only it has. shared: those of the prefix with which others begin as well.
    shared_key: of that prefix, 0 if there is none. has_returned: whether it has had another request
    after its first. forked: of those shared, the ones that were its own before another request went
    on from the same prompt.
    """

    own: float = 0.0
    shared: float = 0.0
    shared_key: int = 0
    has_returned: bool = False
    forked: float = 0.0

    @property
    def begun_with(self) -> float:
        """Returns the tokens that it shared when it began."""
        return self.shared - self.forked

    def grown_to(self, tokens: float) -> "Context":
        """Returns the context after one more request, whose prompt has so many tokens."""
        own = max(0.0, tokens - self.shared)
        return Context(own, self.shared, self.shared_key, has_returned=True, forked=self.forked)


NO_CONTEXT = Context()


class LiveContexts:
    """One worker's live contexts, by the span of time of each one's last request.

    once: how many of these conversations have had one request. returned: how many have had more.
    own_once, own_returned: the tokens that only they have. shared: those of the prefixes that they
    share, each once. expires_at: from when on `expire` is to be called before these are read.

    Times are seconds of one monotonic clock. A call takes the same time for any number of
    conversations.
    """

    __slots__ = (
        "_held",
        "_latest",
        "_prefixes",
        "_spans",
        "expires_at",
        "once",
        "own_once",
        "own_returned",
        "returned",
        "shared",
    )

    def __init__(self) -> None:
        # of each span: how many, and their own tokens, of those with one request and with more
        self._spans = [[0.0] * 4 for _ in range(SPANS)]
        # of each prefix: tokens, when it was last used, and those that were shared at the beginning
        self._prefixes: dict[int, tuple[float, float, float]] = {}
        self._held: dict[int, float] = {}  # token seconds of pauses, by the minute of the return
        self._latest = 0
        self.once = self.returned = 0.0
        self.own_once = self.own_returned = self.shared = 0.0
        self.expires_at = SPAN_SECONDS

    @property
    def conversations(self) -> float:
        """Returns how many conversations live there."""
        return self.once + self.returned

    @property
    def tokens(self) -> float:
        """Returns the tokens of their contexts, a shared prefix once."""
        return self.own_once + self.own_returned + self.shared

    def count(self, now: float, context: Context = NO_CONTEXT) -> None:
        """Counts a conversation whose last request is the one of now."""
        if now >= self.expires_at:
            self.expire(now)
        self._add(self._spans[self._latest % SPANS], 1, context)
        if context.shared_key:
            self._share(context, now)

    def forget(self, since: float, context: Context = NO_CONTEXT) -> None:
        """Counts a conversation no longer, whose last request here was counted at a time."""
        span = int(since // SPAN_SECONDS)
        if span > self._latest - SPANS:
            self._add(self._spans[span % SPANS], -1, context)

    def note_return(self, now: float, seconds: float, context: Context) -> None:
        """Notes that a conversation returns that has held this context for so long."""
        held, minute = self._held, int(now // _MINUTE)
        if minute not in held:
            oldest = minute - NEED_SECONDS / _MINUTE
            for passed in [one for one in held if one < oldest]:
                del held[passed]
        held[minute] = held.get(minute, 0.0) + min(seconds, MOST_PAUSE_SECONDS) * context.own

    def needed(self, now: float) -> float:
        """Returns how many tokens conversations that returned of late have held, on average.

        Those that have ended do not count, nor what sub-agents share with the one that goes on.
        """
        shared = sum([begun for _, _, begun in self._prefixes.values()])
        since = now - NEED_SECONDS
        held = {minute: tokens for minute, tokens in self._held.items() if minute * _MINUTE > since}
        if not held:
            return shared
        seconds = max(_MINUTE, now - max(since, min(held) * _MINUTE))
        return shared + sum(held.values()) / seconds

    def expire(self, now: float) -> None:
        """Counts those no longer that have been silent for too long."""
        if now < self.expires_at:
            return
        span = int(now // SPAN_SECONDS)
        for passed in range(max(self._latest + 1, span - SPANS + 1), span + 1):
            counts = self._spans[passed % SPANS]
            self.once -= counts[0]
            self.returned -= counts[2]
            counts[:] = 0.0, 0.0, 0.0, 0.0
        # sums made anew, so that no rounding stays
        self.own_once = sum([counts[1] for counts in self._spans])
        self.own_returned = sum([counts[3] for counts in self._spans])
        self._latest = max(self._latest, span)
        self.expires_at = (self._latest + 1) * SPAN_SECONDS
        oldest = now - LIVE_SECONDS
        for key in [key for key, (_, used, _) in self._prefixes.items() if used <= oldest]:
            self._drop(key)

    def _add(self, counts: list[float], sign: int, context: Context) -> None:
        if context.has_returned:
            counts[2] += sign
            counts[3] += sign * context.own
            self.returned += sign
            self.own_returned += sign * context.own
        else:
            counts[0] += sign
            counts[1] += sign * context.own
            self.once += sign
            self.own_once += sign * context.own

    def _share(self, context: Context, now: float) -> None:
        prefixes, key = self._prefixes, context.shared_key
        if key in prefixes:
            self._drop(key)
        elif len(prefixes) == MOST_SHARED:
            self._drop(next(iter(prefixes)))
        prefixes[key] = context.shared, now, context.begun_with
        self.shared += context.shared

    def _drop(self, key: int) -> None:
        self.shared = max(0.0, self.shared - self._prefixes.pop(key)[0])
