"""Whether requests are answered by the worker that they were steered to, as the proxy tells."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# Answers of one worker's requests that are looked back at.
RECENT = 16

# Fewer of them that came from elsewhere are chance: a connection that was closed, a retry.
LEAST_ELSEWHERE = 3

# From this share on, a worker's picks are not followed; so few, and they are.
NOT_FOLLOWED = 0.3

# Between two warnings, in seconds.
WARNING_SECONDS = 60.0

NOBODY_FOLLOWED = (
    "no pick is followed: Envoy's cluster has no override_host policy for envoy.lb, or ext_proc"
    " does not receive that namespace (metadata_options), or something removes the header"
)
IS_DOWN = "it does not answer, so Envoy goes on to the next one"
NOT_LISTED = "Envoy's cluster probably lacks this endpoint, or cannot connect to it"
RETRIED = "Envoy retried elsewhere: its connections to it are refused or closed now and then"


@dataclass(slots=True)
class Answers:
    """The answers to what was steered to one worker, as far as their server is known.

    recent: whether each of the last ones came from elsewhere.
    """

    looked_at: int = 0
    elsewhere: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def share(self) -> float:
        """The share of the last ones that came from elsewhere."""
        return sum(self.recent) / len(self.recent)

    def note(self, *, is_elsewhere: bool) -> None:
        """Takes an answer to a request that was steered to the worker."""
        self.looked_at += 1
        self.elsewhere += is_elsewhere
        self.recent.append(is_elsewhere)

    def cause(self, fleet: Callable[[], Iterable["Answers"]], *, is_down: bool) -> str:
        """The likeliest cause why they come from elsewhere, "" if they do not lately.

        fleet: gives the answers of all workers, this one among them.
        """
        if sum(self.recent) < LEAST_ELSEWHERE:
            return ""
        if is_down:
            return IS_DOWN
        known = [one.share for one in fleet() if one.recent]
        if len(known) > 1 and all(share >= NOT_FOLLOWED for share in known):
            return NOBODY_FOLLOWED
        return NOT_LISTED if all(self.recent) else RETRIED


# What became of a steered request: it reached the worker that was named, it reached another one, or
# the proxy did not tell.
DELIVERIES = DELIVERED, ELSEWHERE, UNTOLD = ("delivered", "elsewhere", "unknown")

# Below this share of what was told in the last minute, something is wrong between proxy and router;
# of fewer answers than so many it says nothing.
LEAST_DELIVERED = 0.95
LEAST_TOLD = 20
MINUTE_SECONDS = 60.0
_STEP_SECONDS = 5.0
_STEPS = int(MINUTE_SECONDS / _STEP_SECONDS)


class Deliveries:
    """How many steered requests reached the worker that was picked for them.

    Only some are looked at, each from `look` until `note` or `untold`. looked_at, results: of these
    requests, by model. Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self.looked_at: Counter[str] = Counter()
        self.results: Counter[tuple[str, str]] = Counter()
        # of each step of the last minute its number, and how many were delivered, and elsewhere
        self._steps = [[-_STEPS, 0, 0] for _ in range(_STEPS)]
        self._low_at = float("-inf")
        self._is_low = False

    def look(self, model: str | None) -> None:
        """The response to a steered request is to be shown to us."""
        self.looked_at[model or ""] += 1

    def untold(self, model: str | None) -> None:
        """The request is over, and the proxy did not tell who answered."""
        self.results[model or "", UNTOLD] += 1

    def note(self, model: str | None, now: float, *, is_elsewhere: bool) -> None:
        """The proxy told who answered."""
        self.results[model or "", ELSEWHERE if is_elsewhere else DELIVERED] += 1
        number = int(now / _STEP_SECONDS)
        step = self._steps[number % _STEPS]
        if step[0] != number:
            step[:] = [number, 0, 0]
        step[2 if is_elsewhere else 1] += 1

    def share(self, now: float) -> float | None:
        """The share of the last minute that was delivered; None where too little was told."""
        oldest = int(now / _STEP_SECONDS) - _STEPS
        recent = [step for step in self._steps if step[0] > oldest]
        delivered = sum([step[1] for step in recent])
        told = delivered + sum([step[2] for step in recent])
        return delivered / told if told >= LEAST_TOLD else None

    def fault(self, now: float, cause: Callable[[], str]) -> str:
        """What is wrong if too few were delivered in the last minute, in words; "" if enough were.

        cause: the likeliest one, "" if none is known.
        """
        share = self.share(now)
        if share is None or share >= LEAST_DELIVERED:
            return ""
        why = cause() or RETRIED
        return f"only {share:.0%} of steered requests reached the worker picked for them: {why}"

    def has_turned(self, now: float) -> bool:
        """Whether too few are delivered, or enough again, otherwise than when it was asked last.

        Enough are delivered again after a minute in which the share was never too low.
        """
        share = self.share(now)
        if share is None:
            return False
        if share < LEAST_DELIVERED:
            self._low_at = now
        was_low, self._is_low = self._is_low, now - self._low_at < MINUTE_SECONDS
        return was_low != self._is_low

    def counts(self, steered: Mapping[str | None, int]) -> dict[tuple[str, str], int]:
        """What became of all steered requests, by model and result; none of it ever falls.

        steered: all of them, by model. Those that are not looked at are unknown at once, and those
        that are looked at once they are told of, or over.
        """
        counts = dict(self.results)
        for name, count in steered.items():
            model = name or ""
            for result in DELIVERIES:
                counts.setdefault((model, result), 0)
            counts[model, UNTOLD] += count - self.looked_at[model]
        return counts

    def totals(self, steered: Mapping[str | None, int]) -> dict[str, int]:
        """The same of all models together, by result."""
        totals = dict.fromkeys(DELIVERIES, 0)
        for (_, result), count in self.counts(steered).items():
            totals[result] += count
        return totals


class Share(Protocol):
    """How many requests are steered."""

    percent: float


class SteeringCollector(Collector):
    """Shows at every scrape how many requests were steered, and what became of them.

    steered, unsteered: by model. steering: how many of a hundred are steered now.
    """

    def __init__(
        self,
        deliveries: Deliveries,
        steered: Mapping[str | None, int],
        unsteered: Mapping[str | None, int],
        steering: Share,
    ) -> None:
        self._deliveries = deliveries
        self._steered = steered
        self._unsteered = unsteered
        self._steering = steering

    def collect(self) -> Iterator[Metric]:
        """All families of steering."""
        told = CounterMetricFamily(
            "kvsteer_steered",
            "Requests steered, by whether the picked worker answered; unknown if nobody told",
            labels=["model", "result"],
        )
        for labels, count in self._deliveries.counts(self._steered).items():
            told.add_metric(labels, count)
        left = CounterMetricFamily(
            "kvsteer_unsteered",
            "Requests that were decided and left to the proxy's own choice",
            labels=["model"],
        )
        for model in dict.fromkeys((*self._steered, *self._unsteered)):
            left.add_metric([model or ""], self._unsteered.get(model, 0))
        share = GaugeMetricFamily(
            "kvsteer_steering_percent", "How many of a hundred requests are steered"
        )
        share.add_metric([], self._steering.percent)
        yield from (told, left, share)


class WarningLimit:
    """Tells when one more warning about this is due."""

    def __init__(self) -> None:
        self._told_at = float("-inf")

    def may_warn(self, now: float) -> bool:
        """Whether one is due; it counts as given. now: seconds of a monotonic clock."""
        if now - self._told_at < WARNING_SECONDS:
            return False
        self._told_at = now
        return True
