"""The lean server's connections, as Prometheus has them."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ServerFigures(NamedTuple):
    """connections: that are open. faults: connections that we ended, by the code of their GOAWAY.
    held_bytes: of `extproc.http2.limits.Budget`."""

    connections: int
    faults: Mapping[str, int]
    held_bytes: int


class ServerCollector(Collector):
    """Shows them at every scrape."""

    def __init__(self, figures: Callable[[], ServerFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """All families of the server."""
        now = self._figures()
        yield GaugeMetricFamily(
            "kvsteer_connections", "Connections of proxies that are open", now.connections
        )
        faults = CounterMetricFamily(
            "kvsteer_connection_faults",
            "Connections that were ended for what their peer did, by HTTP/2 error code",
            labels=["code"],
        )
        for code, count in now.faults.items():
            faults.add_metric([code], count)
        yield faults
        yield GaugeMetricFamily(
            "kvsteer_connection_held_bytes",
            "What is kept for open calls, unfinished messages and answers that wait",
            now.held_bytes,
        )
