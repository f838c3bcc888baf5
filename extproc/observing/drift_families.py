"""Predictions against what came of them, as Prometheus has them."""

from collections.abc import Callable, Collection, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.accounting.drifts import Drifts


class DriftCollector(Collector):
    """Shows what came of predictions.

    names: of the workers that there are: the series of one that is gone go with it.
    """

    def __init__(self, drifts: Drifts, names: Callable[[], Collection[str]]) -> None:
        self._drifts = drifts
        self._names = names

    def collect(self) -> Iterator[Metric]:
        """All families of drifts."""
        drifts = self._drifts
        drifts.keep(self._names())
        compared = CounterMetricFamily(
            "kvsteer_predictions_compared",
            "Requests whose predicted cached tokens could be compared with the engine's report",
            labels=["worker"],
        )
        tokens = CounterMetricFamily(
            "kvsteer_compared_cached_tokens",
            "Cached tokens of those requests, as predicted and as reported",
            labels=["worker", "source"],
        )
        causes = CounterMetricFamily(
            "kvsteer_prediction_drifts",
            "Of those, requests whose prediction was wrong, by the likeliest cause",
            labels=["worker", "cause"],
        )
        for worker, drift in drifts.by_worker.items():
            compared.add_metric([worker], drift.requests)
            tokens.add_metric([worker, "predicted"], drift.predicted_tokens)
            tokens.add_metric([worker, "reported"], drift.reported_tokens)
            for cause, count in drift.causes.items():
                causes.add_metric([worker, cause], count)
        yield from (compared, tokens, causes)
