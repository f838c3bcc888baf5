"""The outcomes of requests, as Prometheus has them."""

from collections.abc import Callable, Collection, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.accounting.elsewhere import Elsewhere
from extproc.accounting.outcome_counts import OutcomeCounts
from extproc.observing.decision_families import histogram_family


class OutcomeCollector(Collector):
    """Shows the counts at every scrape.

    names: of the workers that there are; None until they are known. The series of a worker that is
    gone go with it.
    """

    def __init__(self, counts: OutcomeCounts, elsewhere: Elsewhere) -> None:
        self.names: Callable[[], Collection[str]] | None = None
        self._counts = counts
        self._elsewhere = elsewhere

    def collect(self) -> Iterator[Metric]:
        """All families of outcomes."""
        counts = self._counts
        steered = self._elsewhere
        if (counts.responses or steered.counts()) and self.names is not None:
            counts.keep(self.names())
            steered.keep(self.names())
        responses = CounterMetricFamily(
            "kvsteer_responses",
            "Responses by the worker that answered and status; none where no response came",
            labels=["worker", "status"],
        )
        for labels, count in counts.responses.items():
            responses.add_metric(list(labels), count)
        moved = CounterMetricFamily(
            "kvsteer_answered_elsewhere",
            "Requests that another worker answered than the first pick",
            labels=["model"],
        )
        reported = CounterMetricFamily(
            "kvsteer_reported_cached_tokens",
            "Prompt tokens that engines said they had cached",
            labels=["model"],
        )
        for family, by_model in ((moved, counts.moved), (reported, counts.reported_tokens)):
            for model, count in by_model.items():
                family.add_metric([model], count)
        yield from (responses, moved, reported)
        served = CounterMetricFamily(
            "kvsteer_served_known",
            "Answers of which the proxy told the server, by the worker that was picked",
            labels=["worker"],
        )
        astray = CounterMetricFamily(
            "kvsteer_served_elsewhere",
            "Those of them that another server sent, by the worker that was picked",
            labels=["worker"],
        )
        for worker, looked_at, elsewhere in steered.counts():
            served.add_metric([worker], looked_at)
            astray.add_metric([worker], elsewhere)
        yield from (served, astray)
        yield histogram_family(
            "kvsteer_first_byte_seconds",
            "Time from a request's headers to the first byte of its response",
            ["model"],
            [((model,), buckets) for model, buckets in counts.first_byte_seconds.items()],
        )
        yield histogram_family(
            "kvsteer_prediction_error_tokens",
            "Difference between predicted and reported cached tokens, by which was more",
            ["model", "sign"],
            list(counts.error_tokens.items()),
        )
