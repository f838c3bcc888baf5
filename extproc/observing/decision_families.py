"""The decisions' figures, as Prometheus has them."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from extproc.observing.buckets import Buckets, Seen
from extproc.observing.decision_counts import DecisionCounts


class DecisionCollector(Collector):
    """Shows the counts at every scrape."""

    def __init__(self, counts: DecisionCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """All families of decisions."""
        counts = self._counts
        counts.settle()
        decisions = CounterMetricFamily(
            "kvsteer_decisions",
            "Requests placed, by model (empty if none is known) and reason",
            labels=["model", "reason"],
        )
        for (model, reason), count in counts.by_reason.items():
            decisions.add_metric([model, reason], count)
        yield decisions
        yield histogram_family(
            "kvsteer_decision_seconds",
            "Time from the whole request to the pick",
            [],
            [((), counts.seconds)],
        )
        yield histogram_family(
            "kvsteer_phase_seconds",
            "Time of one phase of a decision",
            ["phase"],
            [((phase,), buckets) for phase, buckets in counts.phases.items()],
        )
        yield histogram_family(
            "kvsteer_match_percent",
            "Percent of a prompt that the picked worker certainly held, by model",
            ["model"],
            [((model,), buckets) for model, buckets in counts.match_percent.items()],
        )
        yield _by_model(
            "kvsteer_prompt_tokens",
            "Prompt tokens of the requests that could be keyed",
            counts.prompt_tokens,
        )
        yield _by_model(
            "kvsteer_predicted_cached_tokens",
            "Prompt tokens that the picked worker certainly held",
            counts.predicted_tokens,
        )


def histogram_family(
    name: str, what: str, labels: list[str], series: Iterable[tuple[tuple[str, ...], Buckets]]
) -> HistogramMetricFamily:
    """A histogram of one or more series, each with the values of its labels."""
    family = HistogramMetricFamily(name, what, labels=labels)
    for values, buckets in series:
        family.add_metric(
            list(values),
            [
                (bound, count) if seen is None else (bound, count, _exemplar(seen))
                for bound, count, seen in buckets.cumulative()
            ],
            buckets.total,
        )
    return family


def _exemplar(seen: Seen) -> Exemplar:
    return Exemplar({"trace_id": seen.trace_id}, seen.value, seen.at)


def _by_model(name: str, what: str, tokens: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, what, labels=["model"])
    for model, count in tokens.items():
        family.add_metric([model], count)
    return family
