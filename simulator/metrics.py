"""vLLM's metrics that routers read, under vLLM's names."""

from collections.abc import Iterator
from statistics import fmean

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from simulator.worker import Worker


class WorkerCollector(Collector):
    """Reads the counters of all ranks when scraped, and adds them up."""

    def __init__(self, worker: Worker) -> None:
        self._engines = [rank.engine for rank in worker.ranks]
        self._model = worker.settings.model
        self._settings = worker.settings

    def collect(self) -> Iterator[Metric]:
        """The metric families, each with the label `model_name`."""
        counters = [engine.counters for engine in self._engines]
        running = sum(one.running for one in counters)
        yield self._gauge("num_requests_running", "Requests being computed.", running)
        waiting = sum(one.in_flight for one in counters) - running
        yield self._gauge("num_requests_waiting", "Requests waiting to be computed.", waiting)
        usage = fmean(engine.cache_usage for engine in self._engines)
        yield self._gauge("kv_cache_usage_perc", "Used share of the cache, 1 is all.", usage)
        queried = sum(one.queried_tokens for one in counters)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", queried)
        hit = sum(one.hit_tokens for one in counters)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", hit)
        settings = self._settings
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "The cache.", labels=["block_size", "enable_prefix_caching"]
        )
        config.add_metric([str(settings.block_size_tokens), str(settings.prefix_caching)], 1)
        yield config

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


def registry(worker: Worker) -> CollectorRegistry:
    """A registry of this worker's metrics alone."""
    registry = CollectorRegistry()
    registry.register(WorkerCollector(worker))
    return registry
