"""The cached share of each side of the report, as metrics."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.observing.report import Report

SIDES = ("steered", "unsteered", "cache_unaware")


class SideCollector(Collector):
    """Shows at every scrape how many tokens the requests of each side had, and found cached."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families."""
        prompt = CounterMetricFamily(
            "kvsteer_side_prompt_tokens",
            "Prompt tokens of answered requests, by who placed them and by what",
            labels=["side"],
        )
        cached = CounterMetricFamily(
            "kvsteer_side_cached_tokens",
            "Those that were cached, as engines reported, or else as predicted",
            labels=["side"],
        )
        for side, tokens in zip(SIDES, self._report.tokens(), strict=True):
            prompt.add_metric([side], tokens.prompt)
            cached.add_metric([side], tokens.cached)
        yield from (prompt, cached)
