"""Tracks whether steered requests are answered by the picked worker, as the proxy reports."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# How many recent answers of one worker's requests are considered.
RECENT = 16

# Fewer answers from elsewhere may be due to chance: a closed connection, a retry.
LEAST_ELSEWHERE = 3

# If at least this share of every worker's recent answers came from elsewhere, no pick is followed.
NOT_FOLLOWED = 0.3

# Shortest time between two warnings, in seconds.
WARNING_SECONDS = 60.0

NOBODY_FOLLOWED = (
    "no pick is followed: Envoy's cluster has no override_host policy for envoy.lb, or ext_proc"
    " does not receive that namespace (metadata_options), or something removes the header"
)
IS_DOWN = "it does not answer, so Envoy uses the next one"
NOT_LISTED = "Envoy's cluster probably lacks this endpoint, or cannot connect to it"
RETRIED = "Envoy retried elsewhere: its connections to this worker are sometimes refused or closed"


@dataclass(slots=True)
class Answers:
    """The answers to requests steered to one worker, if their server is known.

    recent: whether each of the last answers came from elsewhere.
    """

    looked_at: int = 0
    elsewhere: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def share(self) -> float:
        """The share of the last answers that came from elsewhere."""
        return sum(self.recent) / len(self.recent)

    def note(self, *, is_elsewhere: bool) -> None:
        """Counts an answer to a request that was steered to the worker."""
        self.looked_at += 1
        self.elsewhere += is_elsewhere
        self.recent.append(is_elsewhere)

    def cause(self, fleet: Callable[[], Iterable["Answers"]], *, is_down: bool) -> str:
        """Returns the likeliest cause of recent answers from elsewhere, "" if there are few.

        fleet: returns the answers of all workers, including this one.
        """
        if sum(self.recent) < LEAST_ELSEWHERE:
            return ""
        if is_down:
            return IS_DOWN
        known = [one.share for one in fleet() if one.recent]
        if len(known) > 1 and all(share >= NOT_FOLLOWED for share in known):
            return NOBODY_FOLLOWED
        return NOT_LISTED if all(self.recent) else RETRIED


# Results of a steered request: it reached the picked worker, it reached another one, or the proxy
# did not report which.
DELIVERIES = DELIVERED, ELSEWHERE, UNTOLD = ("delivered", "elsewhere", "unknown")

# If a smaller share was delivered in the last minute, something is wrong between proxy and router;
# fewer than LEAST_TOLD answers are not judged.
LEAST_DELIVERED = 0.95
LEAST_TOLD = 20
MINUTE_SECONDS = 60.0
_STEP_SECONDS = 5.0
_STEPS = int(MINUTE_SECONDS / _STEP_SECONDS)


class DeliveryCounts:
    """How many steered requests reached the worker that was picked for them.

    Only some are tracked, each from `look` until `note` or `note_unreported`. looked_at, results:
    counts of these requests, by model. Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self.looked_at: Counter[str] = Counter()
        self.results: Counter[tuple[str, str]] = Counter()
        # for each step of the last minute: its number, and counts of delivered and elsewhere
        self._steps = [[-_STEPS, 0, 0] for _ in range(_STEPS)]
        self._low_at = float("-inf")
        self._is_low = False

    def look(self, model: str | None) -> None:
        """Notes that the proxy will report the response to a steered request."""
        self.looked_at[model or ""] += 1

    def note_unreported(self, model: str | None) -> None:
        """Notes that a request has ended, and the proxy did not report who answered."""
        self.results[model or "", UNTOLD] += 1

    def note(self, model: str | None, now: float, *, is_elsewhere: bool) -> None:
        """Notes that the proxy reported who answered; now: seconds of the clock."""
        self.results[model or "", ELSEWHERE if is_elsewhere else DELIVERED] += 1
        number = int(now / _STEP_SECONDS)
        step = self._steps[number % _STEPS]
        if step[0] != number:
            step[:] = [number, 0, 0]
        step[2 if is_elsewhere else 1] += 1

    def share(self, now: float) -> float | None:
        """Returns the share delivered in the last minute; None if too few are known."""
        oldest = int(now / _STEP_SECONDS) - _STEPS
        recent = [step for step in self._steps if step[0] > oldest]
        delivered = sum([step[1] for step in recent])
        known = delivered + sum([step[2] for step in recent])
        return delivered / known if known >= LEAST_TOLD else None

    def fault(self, now: float, cause: Callable[[], str]) -> str:
        """Returns a sentence if too few were delivered in the last minute, else "".

        cause: returns the likeliest cause, "" if none is known.
        """
        share = self.share(now)
        if share is None or share >= LEAST_DELIVERED:
            return ""
        why = cause() or RETRIED
        return f"only {share:.0%} of steered requests reached the worker picked for them: {why}"

    def has_turned(self, now: float) -> bool:
        """Returns whether deliveries failed or recovered since the last call.

        They have recovered a minute after the last call that found the share too low.
        """
        share = self.share(now)
        if share is None:
            return False
        if share < LEAST_DELIVERED:
            self._low_at = now
        was_low, self._is_low = self._is_low, now - self._low_at < MINUTE_SECONDS
        return was_low != self._is_low

    def counts(self, steered: Mapping[str | None, int]) -> dict[tuple[str, str], int]:
        """Returns the results of all steered requests, by model and result; counts never fall.

        steered: all of them, by model. Untracked requests count as unknown at once, tracked ones
        once the proxy reported them or they ended.
        """
        counts = dict(self.results)
        for name, count in steered.items():
            model = name or ""
            for result in DELIVERIES:
                counts.setdefault((model, result), 0)
            counts[model, UNTOLD] += count - self.looked_at[model]
        return counts

    def totals(self, steered: Mapping[str | None, int]) -> dict[str, int]:
        """Returns the same for all models together, by result."""
        totals = dict.fromkeys(DELIVERIES, 0)
        for (_, result), count in self.counts(steered).items():
            totals[result] += count
        return totals


class Share(Protocol):
    """How many requests are steered."""

    percent: float


class SteeringCollector(Collector):
    """Shows how many requests were steered, and their results, at every scrape.

    steered, unsteered: by model. steering: the current percentage of steered requests.
    """

    def __init__(
        self,
        deliveries: DeliveryCounts,
        steered: Mapping[str | None, int],
        unsteered: Mapping[str | None, int],
        steering: Share,
    ) -> None:
        self._deliveries = deliveries
        self._steered = steered
        self._unsteered = unsteered
        self._steering = steering

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of steering."""
        known = CounterMetricFamily(
            "kvsteer_steered",
            "Requests steered, by whether the picked worker answered; unknown if not reported",
            labels=["model", "result"],
        )
        for labels, count in self._deliveries.counts(self._steered).items():
            known.add_metric(labels, count)
        left = CounterMetricFamily(
            "kvsteer_unsteered",
            "Requests that were decided and left to the proxy's own choice",
            labels=["model"],
        )
        for model in dict.fromkeys((*self._steered, *self._unsteered)):
            left.add_metric([model or ""], self._unsteered.get(model, 0))
        share = GaugeMetricFamily(
            "kvsteer_steering_percent", "Percentage of requests that are steered"
        )
        share.add_metric([], self._steering.percent)
        yield from (known, left, share)


class WarningLimit:
    """Limits how often a warning is logged."""

    def __init__(self) -> None:
        self._warned_at = float("-inf")

    def may_warn(self, now: float) -> bool:
        """Returns whether a warning may be logged, and counts it. now: seconds, monotonic."""
        if now - self._warned_at < WARNING_SECONDS:
            return False
        self._warned_at = now
        return True
