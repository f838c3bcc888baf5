"""What is counted, in Prometheus' terms; docs/metrics.md lists every name."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.picking.decision import Decision

_DECISION_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip


class Metrics:
    """The counters of one router."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._decisions = Counter(
            "kvsteer_decisions",
            "Requests placed, by model (empty if none is known) and reason",
            ["model", "reason"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "kvsteer_decision_seconds",
            "Time from the whole request to the pick",
            buckets=_DECISION_BUCKETS,
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "kvsteer_prompt_tokens",
            "Prompt tokens of the requests that could be keyed",
            ["model"],
            registry=self.registry,
        )
        self._predicted_tokens = Counter(
            "kvsteer_predicted_cached_tokens",
            "Prompt tokens that the picked worker certainly held",
            ["model"],
            registry=self.registry,
        )
        self._questions = Counter(
            "kvsteer_remote_tokenizer",
            "Prompts of models whose workers are asked for tokens, by outcome",
            ["model", "outcome"],
            registry=self.registry,
        )
        self._index_bytes = Gauge(
            "kvsteer_index_bytes", "Memory of the block index", registry=self.registry
        )
        self.open_streams = Gauge(
            "kvsteer_open_streams", "ext_proc streams open now", registry=self.registry
        )
        self.protocol_errors = Counter(
            "kvsteer_protocol_errors",
            "Streams ended because the proxy broke the protocol or speaks another dialect",
            registry=self.registry,
        )

    def observe_decision(self, decision: Decision, seconds: float) -> None:
        """Counts one decision."""
        model = decision.model or ""
        self._decisions.labels(model, decision.reason).inc()
        self._seconds.observe(seconds)
        if decision.prompt_tokens:
            self._prompt_tokens.labels(model).inc(decision.prompt_tokens)
            self._predicted_tokens.labels(model).inc(decision.certain_tokens)

    def count_question(self, model: str, outcome: str) -> None:
        """Counts one prompt that a worker was to tokenize."""
        self._questions.labels(model, outcome).inc()

    def add_workers(
        self, status: Callable[[], list[dict[str, Any]]], index_bytes: Callable[[], int]
    ) -> None:
        """Shows the workers' state at every scrape, as GET /workers gives it."""
        self.registry.register(_WorkerCollector(status))
        self._index_bytes.set_function(index_bytes)

    def exposition(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self.registry)


class _WorkerCollector(Collector):
    def __init__(self, status: Callable[[], list[dict[str, Any]]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        workers = self._status()
        yield from _worker_metrics(workers)
        yield from _check_metrics(workers)
        yield from _feed_metrics(workers)


def _worker_metrics(workers: list[dict[str, Any]]) -> Iterator[Metric]:
    in_flight = GaugeMetricFamily(
        "kvsteer_worker_in_flight", "Requests under way on a worker", labels=["worker"]
    )
    blocks = GaugeMetricFamily(
        "kvsteer_index_blocks", "Blocks that a worker holds, by tier", labels=["worker", "tier"]
    )
    for worker in workers:
        in_flight.add_metric([worker["name"]], worker["in_flight"])
        for tier, count in worker["blocks_by_tier"].items():
            blocks.add_metric([worker["name"], tier], count)
    yield in_flight
    yield blocks


def _check_metrics(workers: list[dict[str, Any]]) -> Iterator[Metric]:
    checks = CounterMetricFamily(
        "kvsteer_token_checks",
        "Requests whose tokens were compared with the engine's, by what came of it",
        labels=["worker", "result"],
    )
    differ = GaugeMetricFamily(
        "kvsteer_tokens_differ",
        "1 while a worker's tokens differ from ours, so that its overlap counts as uncertain",
        labels=["worker"],
    )
    for worker in workers:
        tokens = worker["tokens"]
        for result in ("matched", "mismatched", "without_evidence"):
            checks.add_metric([worker["name"], result], tokens[result])
        differ.add_metric([worker["name"]], int(tokens["differs"]))
    yield from (checks, differ)


def _feed_metrics(workers: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = ["worker", "rank"]
    state = GaugeMetricFamily(
        "kvsteer_feed_state", "1 for the state that a feed is in", labels=[*labels, "state"]
    )
    lag = GaugeMetricFamily(
        "kvsteer_feed_lag_seconds", "Age of the last batch when it arrived", labels=labels
    )
    orphans = GaugeMetricFamily(
        "kvsteer_feed_orphans", "Blocks that wait for an unknown parent", labels=labels
    )
    gaps = CounterMetricFamily("kvsteer_feed_gaps", "Gaps in the numbers of a feed", labels=labels)
    replays = CounterMetricFamily("kvsteer_feed_replays", "Replays asked for", labels=labels)
    restarts = CounterMetricFamily("kvsteer_feed_restarts", "Publisher restarts", labels=labels)
    counts = CounterMetricFamily(
        "kvsteer_feed_events", "What was counted on a feed, by kind", labels=[*labels, "kind"]
    )
    for worker in workers:
        for feed in worker["feeds"]:
            where = [worker["name"], str(feed["rank"])]
            state.add_metric([*where, feed["state"]], 1)
            lag.add_metric(where, feed["lag_seconds"])
            orphans.add_metric(where, feed["orphans"])
            gaps.add_metric(where, feed["gaps"])
            replays.add_metric(where, feed["replays"])
            restarts.add_metric(where, feed["restarts"])
            for kind, count in feed["counts"].items():
                counts.add_metric([*where, kind], count)
    yield from (state, lag, orphans, gaps, replays, restarts, counts)
