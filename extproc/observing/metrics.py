"""What is counted, in Prometheus' terms; docs/metrics.md lists every name."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from extproc.observing.course import Course
from extproc.observing.decision_counts import DecisionCollector, DecisionCounts, Seen
from extproc.observing.elsewhere import Elsewhere
from extproc.observing.fleet_families import Shown, fleet_families
from extproc.observing.outcomes import (
    DriftCollector,
    Drifts,
    Outcome,
    OutcomeCollector,
    OutcomeCounts,
)
from extproc.picking.decision import Decision
from extproc.picking.load import Load

OPENMETRICS = "application/openmetrics-text"

# Workers that are read in one go, on the loop that picks: under a millisecond.
AT_ONCE = 32


def _idle(_: str) -> Load:
    return Load()


class Metrics(Collector):
    """The counters of one router, all counted in its event loop.

    registry: of all but those of the workers and their feeds. drifts: predictions against what came
    of them, by worker. clock: seconds since 1970, for the times of exemplars.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._decisions = DecisionCounts()
        self.registry.register(DecisionCollector(self._decisions))
        self._outcomes = OutcomeCounts()
        self.drifts = Drifts()
        self._fleet: Callable[[], Iterable[tuple[Shown, Load]]] = lambda: ()
        self.elsewhere = Elsewhere()
        self._outcome_collector = OutcomeCollector(self._outcomes, self.elsewhere)
        self.registry.register(self._outcome_collector)
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
        self._index_bytes = Gauge(
            "kvsteer_index_bytes", "Memory of the block index", registry=self.registry
        )
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
        outcome = self.drifts.complete(outcome)
        self._outcomes.count(outcome)
        self.drifts.count(outcome)

    def expect_models(self, models: Iterable[str]) -> None:
        """Shows the figures of these models from the start."""
        for model in models:
            self._decisions.expect(model)

    def count_question(self, model: str, outcome: str) -> None:
        """Counts one prompt that a worker was to tokenize."""
        self._questions.labels(model, outcome).inc()

    def add_tokenizer(self, model: str, away: Callable[[], int]) -> None:
        """Shows how many of a model's workers are not asked for tokens, since they keep failing."""
        self._tokenizers_away.labels(model).set_function(away)

    def add_workers(
        self,
        statuses: Callable[[], Iterable[Shown]],
        index_bytes: Callable[[], int],
        load: Callable[[str], Load] = _idle,
        names: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """Shows the workers' state at every scrape.

        statuses: of each worker, as GET /workers has it. load: of an endpoint, now. names: of the
        workers, where they are to be had for less than their status.
        """
        named = names or (lambda: {one["name"] for one in statuses()})
        self._fleet = lambda: ((one, load(one["endpoint"])) for one in statuses())
        self._outcome_collector.names = named
        self.registry.register(DriftCollector(self.drifts, named))
        self._index_bytes.set_function(index_bytes)

    def add_readiness(self, is_ready: Callable[[], bool]) -> None:
        """Shows whether the router is ready, as GET /readyz does."""
        self._ready.set_function(is_ready)

    def add_certificates(
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
        yield from fleet_families(list(self._fleet()))

    def exposition(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self)

    async def read(self) -> Collector:
        """All metrics as they are now; what is collected from them may be made in a thread.

        Workers are read in turns: picks are made between them.
        """
        fleet: list[tuple[Shown, Load]] = []
        for one in self._fleet():
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
