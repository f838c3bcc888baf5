"""Predictions against what came of them, by worker, and why they drift."""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from extproc.accounting.causes import Circumstances, likely_cause
from extproc.accounting.outcome import Outcome


class Drift:
    """One worker's predictions, and how it reports.

    requests: those whose prediction could be compared. predicted_tokens, reported_tokens: of them.
    causes: requests whose prediction was wrong, by the likeliest cause.
    """

    __slots__ = (
        *("causes", "predicted_tokens", "reported_tokens", "requests"),
        *("_forms_with_hits", "_forms_with_zeros"),
    )

    def __init__(self) -> None:
        self.requests = self.predicted_tokens = self.reported_tokens = 0
        self.causes: Counter[str] = Counter()
        self._forms_with_hits: set[str] = set()
        self._forms_with_zeros: set[str] = set()

    def complete(self, outcome: Outcome) -> Outcome:
        """The outcome, with 0 cached tokens where the worker leaves that out.

        SGLang does, and older releases of vLLM: they name cached tokens only where there are some.
        Of a worker that never named any, silence says nothing.
        """
        usage = outcome.reported
        if usage.cached_tokens is not None:
            (self._forms_with_hits if usage.cached_tokens else self._forms_with_zeros).add(
                usage.form
            )
            return outcome
        is_zero = usage.form in self._forms_with_hits - self._forms_with_zeros
        if is_zero and outcome.is_whole and outcome.is_comparable:
            return outcome._replace(reported=usage._replace(cached_tokens=0))
        return outcome

    def shown(self) -> dict[str, Any]:
        """As GET /workers shows it."""
        return {
            "requests": self.requests,
            "predicted_tokens": self.predicted_tokens,
            "reported_tokens": self.reported_tokens,
            "causes": dict(self.causes),
        }


def _nothing_known(_: Outcome) -> Circumstances:
    return Circumstances()


class Drifts:
    """All workers' predictions. circumstances: of the worker that answered, as it is now."""

    def __init__(self, circumstances: Callable[[Outcome], Circumstances] = _nothing_known) -> None:
        self.circumstances = circumstances
        self.by_worker: dict[str, Drift] = {}

    def complete(self, outcome: Outcome) -> Outcome:
        """The outcome, with what its worker is known to leave out of its reports."""
        if not outcome.worker or not outcome.reported.form:
            return outcome
        return self.by_worker.setdefault(outcome.worker, Drift()).complete(outcome)

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
            drift.causes[likely_cause(outcome, self.circumstances(outcome))] += 1

    def of(self, worker: str) -> dict[str, Any]:
        """A worker's predictions, as GET /workers shows them."""
        return self.by_worker.get(worker, Drift()).shown()

    def keep(self, workers: Collection[str]) -> None:
        """Forgets the workers that are not among these."""
        for name in self.by_worker.keys() - set(workers):
            del self.by_worker[name]
