"""Predictions against what came of them, by worker, and why they drift."""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from extproc.accounting.causes import Circumstances, likely_cause
from extproc.accounting.outcome import Outcome


class Drift:
    """One worker's predictions.

    requests: those whose prediction could be compared. predicted_tokens, reported_tokens: of them.
    causes: requests whose prediction was wrong, by the likeliest cause.
    """

    __slots__ = ("causes", "predicted_tokens", "reported_tokens", "requests")

    def __init__(self) -> None:
        self.requests = self.predicted_tokens = self.reported_tokens = 0
        self.causes: Counter[str] = Counter()

    def shown(self) -> dict[str, Any]:
        """As GET /workers shows it."""
        return {
            "requests": self.requests,
            "predicted_tokens": self.predicted_tokens,
            "reported_tokens": self.reported_tokens,
            "causes": dict(self.causes),
        }


class Drifts:
    """All workers' predictions. circumstances: of a worker now, by its name."""

    def __init__(
        self, circumstances: Callable[[str], Circumstances] = lambda _: Circumstances()
    ) -> None:
        self.circumstances = circumstances
        self.by_worker: dict[str, Drift] = {}

    def count(self, outcome: Outcome) -> None:
        """Counts a request that is over, if it says something about a prediction."""
        error, cached = outcome.error_tokens, outcome.reported.cached_tokens
        if error is None or cached is None or not outcome.worker:
            return
        drift = self.by_worker.setdefault(outcome.worker, Drift())
        drift.requests += 1
        drift.predicted_tokens += outcome.predicted_tokens
        drift.reported_tokens += cached
        if error:
            drift.causes[likely_cause(outcome, self.circumstances(outcome.worker))] += 1

    def of(self, worker: str) -> dict[str, Any]:
        """A worker's predictions, as GET /workers shows them."""
        return self.by_worker.get(worker, Drift()).shown()

    def keep(self, workers: Collection[str]) -> None:
        """Forgets the workers that are not among these."""
        for name in self.by_worker.keys() - set(workers):
            del self.by_worker[name]
