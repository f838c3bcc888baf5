"""Metrics of the workers and their feeds: read at every scrape, so that a removed worker's series
disappear."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.routing.load.loads import Load


class ServerFigures(NamedTuple):
    """connections: open ones. faults: connections ended by the server, by GOAWAY code.
    buffered_bytes: bytes in use of `extproc._core.Budget`.
    """

    connections: int
    faults: Mapping[str, int]
    buffered_bytes: int


class ServerCollector(Collector):
    """Shows the server's figures at every scrape."""

    def __init__(self, figures: Callable[[], ServerFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of the server."""
        now = self._figures()
        yield GaugeMetricFamily(
            "kvsteer_connections", "Connections of proxies that are open", now.connections
        )
        faults = CounterMetricFamily(
            "kvsteer_connection_faults",
            "Connections closed because of an error of the peer, by HTTP/2 error code",
            labels=["code"],
        )
        for code, count in now.faults.items():
            faults.add_metric([code], count)
        yield faults
        yield GaugeMetricFamily(
            "kvsteer_connection_held_bytes",
            "Memory held for open calls, unfinished messages and unsent answers",
            now.buffered_bytes,
        )


Shown = Mapping[str, Any]

_UNKNOWN_ENGINE = dict.fromkeys(("name", "version", "frontend"), "unknown")


def fleet_families(fleet: Sequence[tuple[Shown, Load]]) -> Iterator[Metric]:
    """Yields the metric families of workers and feeds.

    fleet: each worker, as GET /workers shows it, and its load.
    """
    workers = [shown for shown, _ in fleet]
    yield from _worker_families(workers)
    yield from _speed_families(workers)
    yield from _context_families(workers)
    yield _failed_halves(workers)
    yield from _transfer_families(workers)
    yield from _load_families([(shown["name"], load) for shown, load in fleet])
    yield from _check_families(workers)
    yield from _feed_states(workers)
    yield from _feed_counts(workers)


def _worker_families(workers: Sequence[Shown]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "kvsteer_worker_state",
        "1 for the state of a worker's feeds, which is that of the worst one",
        labels=["worker", "model", "state"],
    )
    down = GaugeMetricFamily(
        "kvsteer_worker_down",
        "1 while a worker gets no requests because its probes, scrapes or requests fail",
        labels=["worker"],
    )
    in_flight = GaugeMetricFamily(
        "kvsteer_worker_in_flight", "Requests under way on a worker", labels=["worker"]
    )
    block_size = GaugeMetricFamily(
        "kvsteer_worker_block_size_tokens", "Tokens of a worker's block", labels=["worker"]
    )
    saved = GaugeMetricFamily(
        "kvsteer_worker_saved_tokens",
        "Prompt tokens that a worker's cache saved in the last hour",
        labels=["worker"],
    )
    engine = GaugeMetricFamily(
        "kvsteer_worker_engine",
        "1 for the engine that a worker runs, its release and its front end; unknown if it is not"
        " known",
        labels=["worker", "engine", "version", "frontend"],
    )
    blocks = GaugeMetricFamily(
        "kvsteer_index_blocks", "Blocks that a worker holds, by tier", labels=["worker", "tier"]
    )
    for worker in workers:
        state.add_metric([worker["name"], worker["model"], worker["state"]], 1)
        down.add_metric([worker["name"]], int(bool(worker["down"])))
        in_flight.add_metric([worker["name"]], worker["in_flight"])
        block_size.add_metric([worker["name"]], worker["block_size"])
        saved.add_metric([worker["name"]], worker["saved_tokens"])
        known = worker["engine"] or _UNKNOWN_ENGINE
        labels = [known["name"], known["version"], known["frontend"]]
        engine.add_metric([worker["name"], *labels], 1)
        for tier, count in worker["blocks_by_tier"].items():
            blocks.add_metric([worker["name"], tier], count)
    yield from (state, down, in_flight, block_size, saved, engine, blocks)


def _context_families(workers: Sequence[Shown]) -> Iterator[Metric]:
    live = GaugeMetricFamily(
        "kvsteer_live_context_tokens",
        "Tokens of the contexts of the conversations that live on a worker, shared prefixes once",
        labels=["worker", "model"],
    )
    caches = GaugeMetricFamily(
        "kvsteer_cache_tokens",
        "Tokens that a worker's cache has room for; absent if that is not known",
        labels=["worker", "model"],
    )
    for worker in workers:
        labels, contexts = [worker["name"], worker["model"]], worker["contexts"]
        live.add_metric(labels, contexts["live_tokens"])
        if contexts["cache_tokens"] is not None:
            caches.add_metric(labels, contexts["cache_tokens"])
    yield from (live, caches)


def _failed_halves(workers: Sequence[Shown]) -> Metric:
    failed = CounterMetricFamily(
        "kvsteer_worker_failed_halves",
        "Failed requests that a worker shared with another one, counted for both",
        labels=["worker"],
    )
    for worker in workers:
        failed.add_metric([worker["name"]], worker["failed_halves"])
    return failed


def _transfer_families(workers: Sequence[Shown]) -> Iterator[Metric]:
    speed = GaugeMetricFamily(
        "kvsteer_worker_transfer_tokens_per_second",
        "Tokens that a worker sends in a second to those that pull from it, learned or configured",
        labels=["worker"],
    )
    sent = CounterMetricFamily(
        "kvsteer_worker_sent_tokens",
        "Prompt tokens that others were told to pull from a worker",
        labels=["worker"],
    )
    for worker in workers:
        transfers = worker["transfers"]
        if transfers is not None:
            speed.add_metric([worker["name"]], transfers["tokens_per_second"])
            sent.add_metric([worker["name"]], transfers["sent_tokens"])
    yield speed
    yield sent


def _load_families(loads: list[tuple[str, Load]]) -> Iterator[Metric]:
    backlog = GaugeMetricFamily(
        "kvsteer_worker_backlog_tokens",
        "Prompt tokens that a worker still has to compute, as counted in the cost of a pick",
        labels=["worker"],
    )
    others = GaugeMetricFamily(
        "kvsteer_worker_other_requests",
        "Requests on a worker from other senders, by its last report",
        labels=["worker"],
    )
    utilization = GaugeMetricFamily(
        "kvsteer_worker_utilization",
        "Prompt tokens sent to a worker recently, as a share of its capacity",
        labels=["worker"],
    )
    age = GaugeMetricFamily(
        "kvsteer_worker_report_age_seconds",
        "Age of a worker's last load report; absent if none counts any more",
        labels=["worker"],
    )
    for name, load in loads:
        backlog.add_metric([name], load.backlog_tokens)
        others.add_metric([name], load.others)
        utilization.add_metric([name], load.utilization)
        if load.report is not None:
            age.add_metric([name], load.age_seconds)
    yield from (backlog, others, utilization, age)


def _speed_families(workers: Sequence[Shown]) -> Iterator[Metric]:
    speed = GaugeMetricFamily(
        "kvsteer_worker_prefill_tokens_per_second",
        "Prompt tokens that a worker computes in a second: learned, or configured",
        labels=["worker"],
    )
    confidence = GaugeMetricFamily(
        "kvsteer_worker_speed_confidence",
        "How much of a worker's speed was measured recently, 0 to 1",
        labels=["worker"],
    )
    for worker in workers:
        speed.add_metric([worker["name"]], worker["speed"]["tokens_per_second"])
        confidence.add_metric([worker["name"]], worker["speed"]["confidence"])
    yield from (speed, confidence)


def _check_families(workers: Sequence[Shown]) -> Iterator[Metric]:
    checks = CounterMetricFamily(
        "kvsteer_token_checks",
        "Requests whose blocks or tokens were compared with the engine's, by result",
        labels=["worker", "result"],
    )
    differ = GaugeMetricFamily(
        "kvsteer_tokens_differ",
        "1 while a worker's tokens differ from KVSteer's, and its overlap counts as uncertain",
        labels=["worker"],
    )
    doubted = GaugeMetricFamily(
        "kvsteer_tokens_doubted",
        "1 while most of a worker's last requests were not stored as KVSteer tokenizes them",
        labels=["worker"],
    )
    silent = GaugeMetricFamily(
        "kvsteer_feed_silent",
        "1 while a worker's feed is connected and tells nothing of the prompts that it answers",
        labels=["worker"],
    )
    for worker in workers:
        tokens = worker["tokens"]
        for result in ("matched", "mismatched", "without_evidence"):
            checks.add_metric([worker["name"], result], tokens[result])
        differ.add_metric([worker["name"]], int(tokens["state"] == "refuted"))
        doubted.add_metric([worker["name"]], int(tokens["doubted"]))
        silent.add_metric([worker["name"]], int(worker["state"] == "silent"))
    yield from (checks, differ, doubted, silent)


def _feed_states(workers: Sequence[Shown]) -> Iterator[Metric]:
    labels = ["worker", "rank"]
    state = GaugeMetricFamily(
        "kvsteer_feed_state", "1 for the state of a feed", labels=[*labels, "state"]
    )
    lag = GaugeMetricFamily(
        "kvsteer_feed_lag_seconds", "Age of the last batch when it arrived", labels=labels
    )
    uncertain = GaugeMetricFamily(
        "kvsteer_feed_uncertain_blocks", "Blocks that a rank may no longer hold", labels=labels
    )
    orphans = GaugeMetricFamily(
        "kvsteer_feed_orphans", "Blocks that wait for an unknown parent", labels=labels
    )
    for where, feed in _feeds(workers):
        state.add_metric([*where, feed["state"]], 1)
        lag.add_metric(where, feed["lag_seconds"])
        uncertain.add_metric(where, feed["uncertain_blocks"])
        orphans.add_metric(where, feed["orphans"])
    yield from (state, lag, uncertain, orphans)


def _feed_counts(workers: Sequence[Shown]) -> Iterator[Metric]:
    labels = ["worker", "rank"]
    gaps = CounterMetricFamily(
        "kvsteer_feed_gaps", "Gaps in the sequence numbers of a feed", labels=labels
    )
    replays = CounterMetricFamily("kvsteer_feed_replays", "Replays requested", labels=labels)
    restarts = CounterMetricFamily("kvsteer_feed_restarts", "Publisher restarts", labels=labels)
    counts = CounterMetricFamily(
        "kvsteer_feed_events",
        "Everything else counted on a feed, by kind",
        labels=[*labels, "kind"],
    )
    for where, feed in _feeds(workers):
        gaps.add_metric(where, feed["gaps"])
        replays.add_metric(where, feed["replays"])
        restarts.add_metric(where, feed["restarts"])
        for kind, count in feed["counts"].items():
            counts.add_metric([*where, kind], count)
    yield from (gaps, replays, restarts, counts)


def _feeds(workers: Sequence[Shown]) -> Iterator[tuple[list[str], Shown]]:
    """Yields each feed with the values of its labels."""
    for worker in workers:
        for feed in worker["feeds"]:
            yield [worker["name"], str(feed["rank"])], feed
