"""vLLM's metrics that routers read, under vLLM's names."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from simulator.engine import Engine


class EngineCollector(Collector):
    """Reads an engine's counters when scraped."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """The metric families, each with the label `model_name`."""
        counters = self._engine.counters
        yield self._gauge("num_requests_running", "Requests being computed.", counters.running)
        waiting = counters.in_flight - counters.running
        yield self._gauge("num_requests_waiting", "Requests waiting to be computed.", waiting)
        usage = self._engine.cache_usage
        yield self._gauge("kv_cache_usage_perc", "Used share of the cache, 1 is all.", usage)
        queried, hit = counters.queried_tokens, counters.hit_tokens
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", queried)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", hit)

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


def registry(engine: Engine, model: str) -> CollectorRegistry:
    """A registry of this engine's metrics alone."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, model))
    return registry
