"""How many blocks the stores have that workers share, and what they publish themselves."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class StoreCollector(Collector):
    """Shows the stores at every scrape.

    blocks: returns the name of each store, and how many blocks it is known to have. events: returns
    the name of each store that publishes events, and how many came, by kind.
    """

    def __init__(
        self,
        blocks: Callable[[], Iterable[tuple[str, int]]],
        events: Callable[[], Iterable[tuple[str, Mapping[str, int]]]] = tuple,
    ) -> None:
        self._blocks = blocks
        self._events = events

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of the stores."""
        family = GaugeMetricFamily(
            "kvsteer_store_blocks",
            "Blocks that a store shared by workers is known to have",
            labels=["store"],
        )
        for name, count in self._blocks():
            family.add_metric([name], count)
        yield family
        events = CounterMetricFamily(
            "kvsteer_store_events",
            "Events that a store published itself, by what became of them",
            labels=["store", "event"],
        )
        for name, counts in self._events():
            for event, number in counts.items():
                events.add_metric([name, event], number)
        yield events
