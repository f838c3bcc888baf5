"""The metrics for Prometheus; docs/metrics.md lists every name.

Counting must cost a request almost nothing, so it has two forms. What every request counts is kept
as plain numbers by objects of its own (`DecisionCounts`, `OutcomeCounts`, ...), which a collector
turns into families when somebody scrapes; the rest is a Counter of the library. Nothing here
changes a decision. The page, the report and OTLP read the same numbers. Labels are models and
workers that the router knows, and words of which there are few.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from extproc.observing.buckets import TracedValue
from extproc.observing.decisions import DecisionCollector, DecisionCounts, Timeline
from extproc.observing.fleet_families import Shown, fleet_families
from extproc.observing.media_counts import shares_of, shown
from extproc.observing.outcomes import (
    Circumstances,
    DriftCollector,
    HasOutcomes,
    Outcome,
    OutcomeCollector,
    OutcomeCounts,
)
from extproc.observing.recent_counts import RecentCounts
from extproc.observing.report import Report
from extproc.observing.side_tokens import SideCollector
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Media
from extproc.routing.load.loads import Load

OPENMETRICS = "application/openmetrics-text"

# Workers that are read without a pause on the event loop that picks: it takes under a millisecond.
AT_ONCE = 32


class MetricsFleet(Protocol):
    """The parts of the workers that metrics need.

    records: by name; each keeps the outcomes of its worker's requests.
    """

    @property
    def records(self) -> Mapping[str, HasOutcomes]:
        """The records of the workers, by name."""

    def statuses(self) -> Iterable[Shown]:
        """Returns each worker's entry in GET /workers."""

    def load(self, endpoint: str) -> Load:
        """Returns the current load of an endpoint."""

    def index_bytes(self) -> int:
        """Returns the memory of the block index."""

    def tokens_per_second(self, name: str) -> float:
        """Returns how many prompt tokens a worker computes in a second; 0 for an unknown worker."""

    def note_usage(self, outcome: Outcome, known: Callable[[], Circumstances]) -> None:
        """Compares how many tokens an engine counted, and reused, with what the router knows.

        known: returns the circumstances of the outcome.
        """

    def circumstances(self, outcome: Outcome) -> Circumstances:
        """Returns facts that may explain a wrong prediction for a worker."""


class Metrics(Collector):
    """The counters of one router, all counted in its event loop.

    registry: has all metrics but those of the workers and their feeds. fleet: the workers; their
    series exist as long as they do. clock: seconds since 1970, for the times of exemplars and of
    the report. report: the results of requests by time, for GET /report.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, fleet: MetricsFleet, clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._decisions = DecisionCounts()
        self.registry.register(DecisionCollector(self._decisions))
        self._fleet = fleet
        self.report = Report(clock())
        self.registry.register(SideCollector(self.report))
        self._outcomes = OutcomeCounts(fleet.records, fleet.circumstances, fleet.note_usage)
        self.registry.register(OutcomeCollector(self._outcomes))
        self.registry.register(DriftCollector(fleet.records))
        self._questions = Counter(
            "kvsteer_remote_tokenizer",
            "Prompts of models whose workers tokenize, by outcome",
            ["model", "outcome"],
            registry=self.registry,
        )
        self._media_items = Counter(
            "kvsteer_media_items",
            "Media items of requests, by whether the prompt is keyed with them",
            ["model", "kind", "keyed"],
            registry=self.registry,
        )
        self._recent_media = RecentCounts[tuple[str, bool]]()
        # how many media items are known, and the memory of their table
        self.media_known: Callable[[], int] = int
        self.media_bytes: Callable[[], int] = int
        Gauge(
            "kvsteer_media_known", "Media items whose identity is known", registry=self.registry
        ).set_function(lambda: float(self.media_known()))
        Gauge(
            "kvsteer_media_bytes",
            "Memory of the identities of media items, by estimate",
            registry=self.registry,
        ).set_function(lambda: float(self.media_bytes()))
        self._tokenizers_away = Gauge(
            "kvsteer_remote_tokenizers_away",
            "Workers that are not asked for tokens because they keep failing",
            ["model"],
            registry=self.registry,
        )
        Gauge(
            "kvsteer_index_bytes", "Memory of the block index", registry=self.registry
        ).set_function(fleet.index_bytes)
        self._ready = Gauge(
            "kvsteer_ready",
            "1 once the workers' replays are done or the wait for them is over",
            registry=self.registry,
        )
        self._certificate_expiry = Gauge(
            "kvsteer_tls_certificate_expiry_seconds",
            "When the certificate of a listener expires, in seconds since 1970",
            ["listener"],
            registry=self.registry,
        )
        self._certificate_fault = Gauge(
            "kvsteer_tls_fault",
            "1 while the TLS files of a listener cannot be used and the previous ones stay in use",
            ["listener"],
            registry=self.registry,
        )
        self.open_streams = 0  # a plain number: a gauge's lock costs a request two microseconds
        Gauge(
            "kvsteer_open_streams", "ext_proc streams open now", registry=self.registry
        ).set_function(lambda: self.open_streams)
        self.protocol_errors = Counter(
            "kvsteer_protocol_errors",
            "Streams ended because the proxy broke the protocol or speaks another dialect",
            registry=self.registry,
        )
        self.bodies_refused = Counter(
            "kvsteer_bodies_refused",
            "Requests refused since their bodies may have what only the router may write",
            ["reason"],
            registry=self.registry,
        )
        self.isolated = Counter(
            "kvsteer_isolated_requests",
            "Requests of tenants that are kept apart, by what became of them",
            ["outcome"],
            registry=self.registry,
        )

    def observe_decision(self, decision: Decision, timeline: Timeline) -> None:
        """Counts one decision and its phases."""
        self._decisions.note(decision, timeline)
        trace = timeline.trace
        if trace.is_sampled:
            seconds = timeline.picked_at - timeline.started_at
            self._decisions.show(TracedValue(trace.trace_id, seconds, self._clock()))

    def note_recomputed(self, decision: Decision, at: float) -> None:
        """Counts what is computed again of a live conversation whose request has waited.

        at: seconds of the decisions' clock.
        """
        self._decisions.note_recomputed(decision, at)

    def recomputed_share(self, model: str, now: float) -> float | None:
        """Returns the share of a model's prompt tokens of 15 minutes that were computed again.

        None if there were none. now: seconds of the decisions' clock.
        """
        self._decisions.settle()
        return self._decisions.recomputed_share(model, now)

    def count_media(self, model: str | None, media: Media, at: float) -> None:
        """Counts the media items of a request. at: seconds of the decisions' clock."""
        counts = shares_of(media)
        for (kind, is_keyed), count in counts.items():
            self._media_items.labels(model or "", kind, "yes" if is_keyed else "no").inc(count)
        self._recent_media.add(counts, at)

    def keyed_by_kind(self, now: float) -> list[dict[str, Any]]:
        """Returns the answer of GET /media. now: seconds of the decisions' clock."""
        return shown(self._recent_media, now)

    def keyed_by_api(self, now: float) -> list[dict[str, Any]]:
        """Returns the answer of GET /apis. now: seconds of the decisions' clock."""
        self._decisions.settle()
        return self._decisions.keyed.recent(now)

    def decided(self) -> int:
        """Returns how many requests were decided, whatever they call."""
        return self._decisions.total()

    def calls(self) -> int:
        """Returns how many requests were taken for a model's call."""
        return self._decisions.calls()

    def decided_for(self, reason: str) -> int:
        """Returns how many requests were placed for a reason."""
        return self._decisions.for_reason(reason)

    def observe_outcome(self, outcome: Outcome) -> Outcome:
        """Counts an ended request; returns it with the figures that its worker leaves out."""
        completed = self._outcomes.count(outcome)
        speed = self._fleet.tokens_per_second(completed.worker)
        self.report.feed(completed, speed, self._clock())
        return completed

    def note_shed(self, of_class: str) -> None:
        """Notes for the report that a request of a class was refused, since all are busy."""
        self.report.shed(of_class, self._clock())

    def expect_models(self, models: Iterable[str]) -> None:
        """Shows the figures of these models from the start."""
        for model in models:
            self._decisions.expect(model)

    def count_question(self, model: str, outcome: str) -> None:
        """Counts one prompt that a worker was asked to tokenize."""
        self._questions.labels(model, outcome).inc()

    def show_tokenizers_away(self, model: str, away: Callable[[], int]) -> None:
        """Adds the number of a model's workers that are not asked for tokens after failures."""
        self._tokenizers_away.labels(model).set_function(away)

    def show_readiness(self, is_ready: Callable[[], bool]) -> None:
        """Shows whether the router is ready, as GET /readyz does."""
        self._ready.set_function(is_ready)

    def show_certificate(
        self, expires_at: Callable[[], float], has_fault: Callable[[], bool]
    ) -> None:
        """Shows the gRPC server's certificate.

        expires_at: returns when it expires, in seconds since 1970. has_fault: returns whether its
        current files cannot be used.
        """
        self._certificate_expiry.labels("extproc").set_function(expires_at)
        self._certificate_fault.labels("extproc").set_function(has_fault)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics."""
        yield from self.registry.collect()
        yield from fleet_families(list(self._workers_with_loads()))

    def _workers_with_loads(self) -> Iterator[tuple[Shown, Load]]:
        fleet = self._fleet
        return ((one, fleet.load(one["endpoint"])) for one in fleet.statuses())

    async def read(self) -> Collector:
        """Returns a snapshot of all metrics, from which a thread may collect.

        It pauses between workers, so that picks do not wait.
        """
        fleet: list[tuple[Shown, Load]] = []
        for one in self._workers_with_loads():
            fleet.append(one)
            if len(fleet) % AT_ONCE == 0:
                await asyncio.sleep(0)
        return _Snapshot(list(self.registry.collect()), fleet)

    async def exposed(self, accept: str) -> tuple[bytes, str]:
        """Returns all metrics in a format that a scraper accepts, and its content type.

        accept: the scraper's Accept header; only OpenMetrics shows exemplars.
        """
        kinds = [one.partition(";")[0].strip() for one in accept.split(",")]
        read = await self.read()
        if OPENMETRICS in kinds:
            text: bytes = await asyncio.to_thread(openmetrics.generate_latest, read)
            return text, openmetrics.CONTENT_TYPE_LATEST
        return await asyncio.to_thread(generate_latest, read), self.content_type


class _Snapshot(Collector):
    """A snapshot of metrics; the families of the workers are built when it is collected."""

    def __init__(self, families: Sequence[Metric], fleet: Sequence[tuple[Shown, Load]]) -> None:
        self._families = families
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the snapshot."""
        yield from self._families
        yield from fleet_families(self._fleet)
