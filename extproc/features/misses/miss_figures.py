"""Shows the totals of verdicts as metrics: `misses`."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.features.misses.last_prompts import LastPrompts
from extproc.features.misses.totals import Totals


class MissFigures(Collector):
    """The figures of one router. prompts: those that are remembered."""

    def __init__(self, totals: Totals, prompts: LastPrompts) -> None:
        self._totals = totals
        self._prompts = prompts

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of verdicts."""
        yield from self._by_client()
        ways = CounterMetricFamily(
            "kvsteer_turn_verdicts", "Verdicts of turns, by how they were found", labels=["way"]
        )
        for way, count in self._totals.ways.items():
            ways.add_metric([way], count)
        yield ways
        yield GaugeMetricFamily(
            "kvsteer_last_prompts",
            "Conversations whose last prompt is remembered",
            len(self._prompts),
        )
        yield GaugeMetricFamily(
            "kvsteer_last_prompts_bytes", "Memory of last prompts in bytes", self._prompts.bytes
        )

    def _by_client(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "kvsteer_turn_tokens",
            "Prompt tokens of turns, by what became of them or why they were computed",
            labels=["model", "client", "cause"],
        )
        seconds = CounterMetricFamily(
            "kvsteer_again_seconds",
            "Estimated seconds of prefill for tokens that could have been reused",
            labels=["model", "client"],
        )
        for (model, client), sent in self._totals.by_client().items():
            for cause, count in sent.tokens.items():
                tokens.add_metric([model, client, cause.value], count)
            seconds.add_metric([model, client], sent.again_seconds)
        yield from (tokens, seconds)
