"""How many blocks the stores have that workers share."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class StoreCollector(Collector):
    """Shows the stores at every scrape.

    blocks: returns the name of each store, and how many blocks it is known to have.
    """

    def __init__(self, blocks: Callable[[], Iterable[tuple[str, int]]]) -> None:
        self._blocks = blocks

    def collect(self) -> Iterator[Metric]:
        """Yields the metric family of the stores."""
        family = GaugeMetricFamily(
            "kvsteer_store_blocks",
            "Blocks that a store shared by workers is known to have",
            labels=["store"],
        )
        for name, count in self._blocks():
            family.add_metric([name], count)
        yield family
