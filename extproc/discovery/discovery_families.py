"""The sources of workers, as Prometheus has them."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class DiscoveryCollector(Collector):
    """Shows the sources at every scrape.

    status: as GET /discovery gives it.
    """

    def __init__(self, status: Callable[[], list[dict[str, Any]]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """All families of discovery."""
        workers = GaugeMetricFamily(
            "kvsteer_discovery_workers", "Workers in the last view of a source", labels=["source"]
        )
        age = GaugeMetricFamily(
            "kvsteer_discovery_age_seconds",
            "Time since a source last confirmed its view",
            labels=["source"],
        )
        fault = GaugeMetricFamily(
            "kvsteer_discovery_fault",
            "1 while a source cannot be read, so that its last view stays",
            labels=["source"],
        )
        faults = CounterMetricFamily(
            "kvsteer_discovery_faults", "Faults of a source", labels=["source"]
        )
        for one in self._status():
            source = [one["source"]]
            workers.add_metric(source, one["workers"] or 0)
            if one["age_seconds"] is not None:
                age.add_metric(source, one["age_seconds"])
            fault.add_metric(source, int(bool(one["fault"])))
            faults.add_metric(source, one["faults"])
        yield from (workers, age, fault, faults)
