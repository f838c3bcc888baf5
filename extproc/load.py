"""What each endpoint has to do, as far as our own picks tell: the streams in flight."""

from collections import defaultdict
from dataclasses import dataclass, field

from extproc.pick import Load

# How fast an endpoint is taken to work off uncached prompt tokens. Only its order of magnitude
# matters: it decides for how long a long prompt makes its endpoint less attractive.
PREFILL_TOKENS_PER_SECOND = 8_000.0


@dataclass(eq=False, slots=True)
class Booking:
    """One request on its way to an endpoint; uncached_tokens is the work it was expected to be."""

    endpoint: str
    uncached_tokens: float


@dataclass(slots=True)
class _Endpoint:
    bookings: set[Booking] = field(default_factory=set)
    backlog_tokens: float = 0.0
    backlog_at: float = 0.0


_IDLE = Load()


class Loads:
    """Requests in flight on each endpoint. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._endpoints: defaultdict[str, _Endpoint] = defaultdict(_Endpoint)

    def begin(self, endpoint: str, uncached_tokens: float, now: float) -> Booking:
        """Books a request on an endpoint until `end`."""
        booking = Booking(endpoint, uncached_tokens)
        state = self._endpoints[endpoint]
        state.backlog_tokens = self.backlog_tokens(endpoint, now) + uncached_tokens
        state.backlog_at = now
        state.bookings.add(booking)
        return booking

    def end(self, booking: Booking) -> None:
        """The request is over; ending it again changes nothing."""
        state = self._endpoints.get(booking.endpoint)
        if state is None:
            return
        state.bookings.discard(booking)
        left = sum(other.uncached_tokens for other in state.bookings)
        state.backlog_tokens = min(state.backlog_tokens, left)
        if not state.bookings:
            del self._endpoints[booking.endpoint]

    def in_flight(self, endpoint: str) -> int:
        """Requests on their way to, or being answered by, an endpoint."""
        state = self._endpoints.get(endpoint)
        return len(state.bookings) if state else 0

    def load(self, endpoint: str, now: float) -> Load:
        """Both of an endpoint, in one call."""
        if endpoint not in self._endpoints:
            return _IDLE
        return Load(self.in_flight(endpoint), self.backlog_tokens(endpoint, now))

    def backlog_tokens(self, endpoint: str, now: float) -> float:
        """Uncached prompt tokens that the endpoint has probably not computed yet."""
        state = self._endpoints.get(endpoint)
        if state is None:
            return 0.0
        done = max(0.0, now - state.backlog_at) * PREFILL_TOKENS_PER_SECOND
        return max(0.0, state.backlog_tokens - done)
