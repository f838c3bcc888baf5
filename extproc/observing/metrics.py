"""What is counted, in Prometheus' terms; docs/metrics.md lists every name."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from extproc.observing.buckets import Seen
from extproc.observing.course import Course
from extproc.observing.decision_counts import DecisionCollector, DecisionCounts
from extproc.observing.fleet_families import Shown, fleet_families
from extproc.observing.outcomes import (
    Circumstances,
    DriftCollector,
    HasOutcomes,
    Outcome,
    OutcomeCollector,
    OutcomeCounts,
)
from extproc.observing.report import Report
from extproc.picking.decision import Decision
from extproc.picking.load import Load

OPENMETRICS = "application/openmetrics-text"

# Workers that are read in one go, on the loop that picks: under a millisecond.
AT_ONCE = 32


class Fleet(Protocol):
    """The workers, as far as they are shown and counted.

    records: by name, each of which keeps what came of its worker's requests.
    """

    @property
    def records(self) -> Mapping[str, HasOutcomes]:
        """See above."""

    def statuses(self) -> Iterable[Shown]:
        """Each worker, as GET /workers has it."""

    def load(self, endpoint: str) -> Load:
        """What an endpoint has to do now."""

    def index_bytes(self) -> int:
        """Memory of the block index."""

    def tokens_per_second(self, name: str) -> float:
        """How many tokens of prompts a worker computes in a second; 0 for no worker of ours."""

    def circumstances(self, outcome: Outcome) -> Circumstances:
        """What may explain that a prediction for a worker did not come true."""


class Metrics(Collector):
    """The counters of one router, all counted in its event loop.

    registry: of all but those of the workers and their feeds. fleet: the workers; their series come
    and go with them. clock: seconds since 1970, for the times of exemplars and of the report.
    report: what came of requests by time, for GET /report.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._decisions = DecisionCounts()
        self.registry.register(DecisionCollector(self._decisions))
        self._fleet = fleet
        self.report = Report(clock())
        self._outcomes = OutcomeCounts(fleet.records, fleet.circumstances)
        self.registry.register(OutcomeCollector(self._outcomes))
        self.registry.register(DriftCollector(fleet.records))
        self._questions = Counter(
            "kvsteer_remote_tokenizer",
            "Prompts of models whose workers are asked for tokens, by outcome",
            ["model", "outcome"],
            registry=self.registry,
        )
        self._tokenizers_away = Gauge(
            "kvsteer_remote_tokenizers_away",
            "Workers that are not asked for tokens, since they keep failing",
            ["model"],
            registry=self.registry,
        )
        Gauge(
            "kvsteer_index_bytes", "Memory of the block index", registry=self.registry
        ).set_function(fleet.index_bytes)
        self._ready = Gauge(
            "kvsteer_ready",
            "1 once the workers' replays are done or were waited for long enough",
            registry=self.registry,
        )
        self._certificate_expiry = Gauge(
            "kvsteer_tls_certificate_expiry_seconds",
            "When the certificate of a listener ends to be valid, in seconds since 1970",
            ["listener"],
            registry=self.registry,
        )
        self._certificate_fault = Gauge(
            "kvsteer_tls_fault",
            "1 while the TLS files of a listener cannot be used, so that those before stay in use",
            ["listener"],
            registry=self.registry,
        )
        self.open_streams = 0  # a gauge's own lock costs a request two microseconds
        Gauge(
            "kvsteer_open_streams", "ext_proc streams open now", registry=self.registry
        ).set_function(lambda: self.open_streams)
        self.protocol_errors = Counter(
            "kvsteer_protocol_errors",
            "Streams ended because the proxy broke the protocol or speaks another dialect",
            registry=self.registry,
        )

    def observe_decision(self, decision: Decision, course: Course) -> None:
        """Counts one decision and its phases."""
        self._decisions.note(decision, course)
        trace = course.trace
        if trace.is_sampled:
            seconds = course.picked_at - course.started_at
            self._decisions.show(Seen(trace.trace_id, seconds, self._clock()))

    def observe_outcome(self, outcome: Outcome) -> None:
        """Counts a request that is over, where its response was shown to us."""
        completed = self._outcomes.count(outcome)
        speed = self._fleet.tokens_per_second(completed.worker)
        self.report.feed(completed, speed, self._clock())

    def expect_models(self, models: Iterable[str]) -> None:
        """Shows the figures of these models from the start."""
        for model in models:
            self._decisions.expect(model)

    def count_question(self, model: str, outcome: str) -> None:
        """Counts one prompt that a worker was to tokenize."""
        self._questions.labels(model, outcome).inc()

    def show_tokenizers_away(self, model: str, away: Callable[[], int]) -> None:
        """Shows how many of a model's workers are not asked for tokens, since they keep failing."""
        self._tokenizers_away.labels(model).set_function(away)

    def show_readiness(self, is_ready: Callable[[], bool]) -> None:
        """Shows whether the router is ready, as GET /readyz does."""
        self._ready.set_function(is_ready)

    def show_certificate(
        self, expires_at: Callable[[], float], has_fault: Callable[[], bool]
    ) -> None:
        """Shows the gRPC server's certificate.

        expires_at: when it ends to be valid, in seconds since 1970. has_fault: whether its files
        cannot be used as they are now.
        """
        self._certificate_expiry.labels("extproc").set_function(expires_at)
        self._certificate_fault.labels("extproc").set_function(has_fault)

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        yield from self.registry.collect()
        yield from fleet_families(list(self._shown()))

    def _shown(self) -> Iterator[tuple[Shown, Load]]:
        fleet = self._fleet
        return ((one, fleet.load(one["endpoint"])) for one in fleet.statuses())

    def exposition(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self)

    async def read(self) -> Collector:
        """All metrics as they are now; what is collected from them may be made in a thread.

        Workers are read in turns: picks are made between them.
        """
        fleet: list[tuple[Shown, Load]] = []
        for one in self._shown():
            fleet.append(one)
            if len(fleet) % AT_ONCE == 0:
                await asyncio.sleep(0)
        return _Read(list(self.registry.collect()), fleet)

    async def exposed(self, accept: str) -> tuple[bytes, str]:
        """All metrics in a format that a scraper accepts, and its content type.

        accept: the scraper's Accept header; only OpenMetrics shows exemplars.
        """
        kinds = [one.partition(";")[0].strip() for one in accept.split(",")]
        read = await self.read()
        if OPENMETRICS in kinds:
            text: bytes = await asyncio.to_thread(openmetrics.generate_latest, read)
            return text, openmetrics.CONTENT_TYPE_LATEST
        return await asyncio.to_thread(generate_latest, read), self.content_type


class _Read(Collector):
    """Metrics that were read already; families of the workers are made when they are collected."""

    def __init__(self, families: Sequence[Metric], fleet: Sequence[tuple[Shown, Load]]) -> None:
        self._families = families
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """As they were read."""
        yield from self._families
        yield from fleet_families(self._fleet)
