"""Live contexts: what the conversations that live on a worker hold of its cache.

A conversation that waits for its user or its tools is in flight nowhere, but its next turn will
come, and finds its cache only if nothing evicted it. So for a worker it is load to be expected, and
cache that is taken, until the conversation has been silent for a while.
"""

from typing import NamedTuple

# A conversation counts until it has been silent for so many seconds, less one span at most.
SPAN_SECONDS = 15.0
SPANS = 8
LIVE_SECONDS = SPAN_SECONDS * SPANS

# Most prefixes of which one worker's conversations are known to share one.
MOST_SHARED = 64


class Context(NamedTuple):
    """What one conversation holds of a cache, in tokens.

    own: those that only it has. shared: those of the prefix with which others begin as well.
    shared_key: of that prefix, 0 if there is none. has_returned: whether it has had another request
    after its first.
    """

    own: float = 0.0
    shared: float = 0.0
    shared_key: int = 0
    has_returned: bool = False

    def grown_to(self, tokens: float) -> "Context":
        """Returns the context after one more request, whose prompt has so many tokens."""
        return self._replace(own=max(0.0, tokens - self.shared), has_returned=True)


NO_CONTEXT = Context()


class Occupancy(NamedTuple):
    """How full of live contexts a worker's cache is.

    conversations: how many that are expected to return live there. tokens: of their contexts, a
    shared prefix once. capacity: the size of the cache in tokens, None if it is not known.
    returning: the share of all conversations that return after their first request.
    """

    conversations: float = 0.0
    tokens: float = 0.0
    capacity: int | None = None
    returning: float = 1.0

    @property
    def share(self) -> float:
        """The share of the cache that is full of them, at most 1; 0 if its size is not known."""
        return min(1.0, self.tokens / self.capacity) if self.capacity else 0.0

    def without(self, context: Context) -> "Occupancy":
        """Returns the same without one of the conversations."""
        count, tokens = max(0.0, self.conversations - 1), max(0.0, self.tokens - context.own)
        return self._replace(conversations=count, tokens=tokens)


class LiveContexts:
    """Counts one worker's live contexts by the span of time of each one's last request.

    Times are seconds of one monotonic clock. A call takes the same time for any number of
    conversations.
    """

    __slots__ = ("_latest", "_once", "_returned", "_shared")

    def __init__(self) -> None:
        self._once = _Spans()
        self._returned = _Spans()
        self._shared: dict[int, tuple[float, float]] = {}  # tokens, and when it was last used
        self._latest = 0

    def count(self, now: float, context: Context = NO_CONTEXT) -> None:
        """Counts a conversation whose last request is the one of now."""
        span = int(now // SPAN_SECONDS)
        if span > self._latest:
            first = max(self._latest + 1, span - SPANS + 1)
            self._once.clear(first, span)
            self._returned.clear(first, span)
            self._latest = span
        self._spans(context).add(span, 1, context.own)
        if context.shared_key:
            self._share(context, now)

    def _spans(self, context: Context) -> "_Spans":
        return self._returned if context.has_returned else self._once

    def _share(self, context: Context, now: float) -> None:
        shared = self._shared
        shared.pop(context.shared_key, None)
        shared[context.shared_key] = context.shared, now
        if len(shared) > MOST_SHARED:
            del shared[next(iter(shared))]

    def forget(self, since: float, context: Context = NO_CONTEXT) -> None:
        """Counts a conversation no longer, whose last request here was counted at a time."""
        span = int(since // SPAN_SECONDS)
        if span > self._latest - SPANS:
            self._spans(context).add(span, -1, -context.own)

    def occupancy(
        self, now: float, capacity: int | None = None, returning: float = 1.0
    ) -> Occupancy:
        """Returns how many conversations live here now, and the tokens of their contexts.

        capacity, returning: as in `Occupancy`; a conversation that had only one request counts as
        much as it is likely to return.
        """
        oldest = max(int(now // SPAN_SECONDS) - SPANS + 1, self._latest - SPANS + 1)
        once, own_once = self._once.sums(oldest, self._latest)
        count, own = self._returned.sums(oldest, self._latest)
        shared = sum([tokens for tokens, at in self._shared.values() if now - at < LIVE_SECONDS])
        tokens = max(0.0, own + returning * own_once) + shared
        return Occupancy(count + returning * once, tokens, capacity, returning)


class _Spans:
    """How many conversations had their last request in each span, and their own tokens."""

    __slots__ = ("_counts", "_own")

    def __init__(self) -> None:
        self._counts = [0] * SPANS
        self._own = [0.0] * SPANS

    def clear(self, first: int, last: int) -> None:
        for span in range(first, last + 1):
            self._counts[span % SPANS], self._own[span % SPANS] = 0, 0.0

    def add(self, span: int, count: int, own: float) -> None:
        self._counts[span % SPANS] += count
        self._own[span % SPANS] += own

    def sums(self, first: int, last: int) -> tuple[int, float]:
        places = [span % SPANS for span in range(first, last + 1)]
        counts, own = self._counts, self._own
        return sum([counts[place] for place in places]), sum([own[place] for place in places])
