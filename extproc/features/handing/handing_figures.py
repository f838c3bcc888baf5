"""Counts the requests whose ids went with them, or why not: `policy.hand_tokens`."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.proof.samples import Samples


class HandingFigures(Collector):
    """The figures of one router. samples: returns those of each worker, by its name."""

    def __init__(self, samples: Callable[[], Iterable[tuple[str, Samples]]]) -> None:
        self._samples = samples
        self._requests: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[str] = Counter()

    def count(self, model: str, outcome: str, tokens: int) -> None:
        """Counts a request. tokens: those that went with it."""
        self._requests[model, outcome] += 1
        if tokens:
            self._tokens[model] += tokens

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of handed ids."""
        requests = CounterMetricFamily(
            "kvsteer_token_handovers",
            "Requests, by whether the ids of their prompts went with them, or why not",
            labels=["model", "outcome"],
        )
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        yield _by_model(self._tokens)
        samples = CounterMetricFamily(
            "kvsteer_handover_samples",
            "Requests that were compared with what their engines counted, by what they showed",
            labels=["worker", "result"],
        )
        refuted = GaugeMetricFamily(
            "kvsteer_handover_refuted",
            "1 if the worker gets no ids, since what its engine counted disagreed",
            labels=["worker"],
        )
        for worker, known in self._samples():
            for result, count in known.results.items():
                samples.add_metric([worker, result], count)
            refuted.add_metric([worker], int(bool(known.refuted)))
        yield from (samples, refuted)


def _by_model(tokens: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(
        "kvsteer_handed_tokens", "Tokens that engines did not have to make", labels=["model"]
    )
    for model, count in tokens.items():
        family.add_metric([model], count)
    return family
