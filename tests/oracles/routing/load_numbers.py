"""The numbers of a load and its arithmetic, as extproc/native/numbers.c keeps them."""

from math import exp, inf

from extproc.routing.load.reports import ReportedGauges


class PlainPace:
    """How fast a worker computes.

    slowness: how many times as long as configured a prompt takes. pace: how many times as fast as
    configured its queue shrinks. is_even: whether it counts as average.
    """

    __slots__ = ("is_even", "pace", "slowness")

    def __init__(self) -> None:
        self.slowness = self.pace = 1.0
        self.is_even = True


class PlainNumbers:
    """The numbers of one endpoint. Times are seconds of one clock; now: the time.

    rate: the configured tokens per second. window: seconds in which what was sent fades.

    in_flight: its requests. backlog_tokens: the estimated queue at backlog_at, in prompt tokens;
    lately_tokens: those sent lately, older ones counting less, at the same time. booked_tokens: of
    requests not known to be computed; sent_tokens: of all so far. ahead_tokens: other routers',
    since this router's last request whose end of computing is announced: the next such request
    waits for them. shared, shared_tokens: requests and booked tokens of routers that share. others,
    excess_tokens: requests and tokens beyond those that its worker reported at asked_at.
    """

    __slots__ = (
        "_pace",
        "ahead_tokens",
        "asked_at",
        "backlog_at",
        "backlog_tokens",
        "booked_tokens",
        "excess_tokens",
        "in_flight",
        "lately_tokens",
        "others",
        "sent_tokens",
        "shared",
        "shared_tokens",
    )

    def __init__(self, pace: PlainPace, /) -> None:
        self._pace = pace
        self.in_flight = self.shared = self.shared_tokens = 0
        self.backlog_tokens = self.lately_tokens = self.booked_tokens = self.sent_tokens = 0.0
        self.ahead_tokens = self.others = self.excess_tokens = 0.0
        self.backlog_at = self.asked_at = -inf

    def backlog(self, now: float, rate: float, /) -> float:
        """Returns the uncached tokens of known requests that are probably not computed yet."""
        done = max(0.0, now - self.backlog_at) * rate * self._pace.pace
        return max(0.0, self.backlog_tokens - done)

    def lately(self, now: float, window: float, /) -> float:
        """Returns the uncached tokens sent lately, older ones counting less, as in `Loads.load`."""
        return self.lately_tokens * exp(-max(0.0, now - self.backlog_at) / window)

    def begin(self, tokens: float, now: float, rate: float, window: float, /) -> float:
        """Adds a request with so many uncached tokens; returns the tokens queued before it."""
        left = self.backlog(now, rate)
        self.in_flight += 1
        self.lately_tokens = self.lately(now, window) + tokens
        self.backlog_tokens = left + tokens
        self.backlog_at = now
        self.booked_tokens += tokens
        self.sent_tokens += tokens
        return left

    def leave(self, tokens: float, is_last: bool, /) -> None:
        """Removes a request's tokens from the booked ones.

        is_last: whether no other is queued; then rounding errors of the running sum end.
        """
        self.booked_tokens -= self.booked_tokens if is_last else tokens

    def end(self, now: float, rate: float, window: float, /) -> None:
        """Removes a request in flight."""
        self.in_flight -= 1
        self.bound(self.backlog(now, rate), now, window)

    def bound(self, backlog: float, now: float, window: float, /) -> None:
        """Sets the estimate of the queue, to at most the tokens not known to be computed."""
        most = self.booked_tokens + self.shared_tokens
        self.lately_tokens = self.lately(now, window)
        self.backlog_tokens, self.backlog_at = min(backlog, most), now

    def reported(self, now: float, rate: float, window: float, /) -> ReportedGauges:
        """Returns what this router tells others of its own requests, as `Gauges`."""
        booked = self.booked_tokens + self.shared_tokens
        own_part = self.booked_tokens / booked if booked else 0.0
        return (
            self.in_flight,
            round(self.booked_tokens),
            round(self.sent_tokens),
            round(own_part * self.backlog(now, rate)),
            round(self.lately(now, window)),
        )

    def share(
        self,
        requests: int,
        booked: int,
        queued: float,
        sent: float,
        now: float,
        rate: float,
        window: float,
        most: float,
        /,
    ) -> None:
        """Adds what another router told: requests and booked tokens, fewer if negative.

        queued, sent: tokens that join the queue, and those sent lately. most: so many of these,
        times the pace, may other routers' figures make.
        """
        backlog, lately = self.backlog(now, rate), self.lately(now, window)
        most = max(lately, most * self._pace.pace)
        self.shared += requests
        self.shared_tokens += booked
        known = self.booked_tokens + self.shared_tokens
        self.backlog_tokens, self.backlog_at = min(backlog + queued, known), now
        self.lately_tokens = min(lately + sent, most)
        self.ahead_tokens = min(self.ahead_tokens + queued, most)
