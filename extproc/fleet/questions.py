"""What every worker is asked, and how often."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from extproc.fleet.asking.ask_interval import AskInterval
from extproc.fleet.asking.polling import Client, PeriodicCheck, Polling, Question
from extproc.fleet.candidates import Candidates
from extproc.fleet.engine_knowledge import EngineKnowledge
from extproc.fleet.health.doubts import Doubts
from extproc.fleet.health.health_probe import HealthProbe
from extproc.fleet.health.sleeping import Sleeping
from extproc.fleet.identity.learning import Learning
from extproc.fleet.load.computed import Computed
from extproc.fleet.load.load_reports import LoadReports
from extproc.fleet.load.pull_arrivals import PullArrivals
from extproc.fleet.records.shared import SharedByFleet
from extproc.fleet.records.worker import SelfReport, Worker
from kvstate.events import EngineLoad
from kvstate.feeds.feed import FeedState


class _RegularQuestion(Protocol):
    """A question that every worker is asked once an interval."""

    interval: AskInterval
    question: Question

    async def ask(self, client: Client, worker: Worker) -> float:
        """Asks once; returns the seconds until the worker is asked again."""


class Questions:
    """Asks workers for their load, their health, what they serve and how they tokenize.

    engines, learning, sleeping: what some of the questions are for. regular: the questions that
    every worker is asked once an interval. polling: carries out all questions, also those of the
    feeds. pulls: looks when workers have what they pull from others.
    """

    def __init__(
        self,
        shared: SharedByFleet,
        candidates: Candidates,
        engines: EngineKnowledge,
        learning: Learning,
        sleeping: Sleeping,
    ) -> None:
        self._shared = shared
        self._table = shared.table
        self._feeds = shared.followed.feeds
        self._engines = engines
        self._learning = learning
        self.polling = Polling(shared.surroundings.make_client)
        self.regular: list[_RegularQuestion] = []
        self._checks: list[PeriodicCheck] = []
        self._add_load(candidates, sleeping)
        self._add_health(sleeping)
        self._checks += [engines.identifying.check, candidates.pins.check]
        overlaps = shared.followed.blocks.overlaps
        self.pulls = PullArrivals(overlaps, self._delay_seconds, shared.monotonic)
        if shared.config.disaggregation.price_pulls:
            self._checks.append(self.pulls.check)

    def _add_load(self, candidates: Candidates, sleeping: Sleeping) -> None:
        """Adds what reads the workers' load, and what measures how fast they compute."""
        table, monotonic, loads = self._table, self._shared.monotonic, candidates.loads
        policy, blocks = self._shared.config.policy, self._shared.followed.blocks
        interval = AskInterval(policy.scrape_interval_ms / 1000, self._shared.chance, monotonic)
        reports = LoadReports(table, loads, self._feed_loads, interval, monotonic, sleeping.note)
        if policy.scrape_interval_ms:
            self.regular.append(reports)
        self._checks.append(reports.check)
        if policy.learn:
            batches, size = self._feeds.batches, candidates.block_size
            computed = Computed(table, loads, blocks.overlaps, batches, size, monotonic)
            self._checks.append(computed.check)

    def _add_health(self, sleeping: Sleeping) -> None:
        """Adds the health probe, or what asks only workers in doubt; by default the latter."""
        table, monotonic = self._table, self._shared.monotonic
        interval_ms = self._shared.config.policy.probe_interval_ms
        if interval_ms is None:
            doubts = Doubts(table, self.polling, self._sign_of_life, monotonic, sleeping.ask)
            self._checks.append(doubts.check)
        elif interval_ms:
            interval = AskInterval(interval_ms / 1000, self._shared.chance, monotonic)
            self.regular.append(HealthProbe(table, interval, monotonic))

    def start(self) -> None:
        """Asks every worker, and begins the periodic checks."""
        for worker in self._table:
            self.ask(worker)
        self.polling.start(self._checks)

    def stop(self) -> None:
        """Asks no worker any more."""
        for worker in self._table:
            for question in list(worker.polls):
                worker.stop_asking(question)

    def ask(self, worker: Worker) -> None:
        """Starts a worker's regular questions, and stops those that it no longer needs."""
        for one in self.regular:
            self._poll(worker, one.question, one.ask, one.interval.first_seconds())
        verifying, identifying = self._engines.verifying, self._engines.identifying
        learning = self._learning
        identifying.expect(worker)
        self._poll(worker, identifying.question, identifying.ask)
        verifying.expect(worker)
        if verifying.is_needed:
            self._poll(worker, verifying.question, verifying.ask, verifying.first_seconds())
        if worker.sighting.worker.learn:
            self._poll(worker, learning.question, learning.ask)
        else:
            worker.stop_asking(learning.question.name)
            worker.self_report = SelfReport()

    def _poll(
        self,
        worker: Worker,
        question: Question,
        ask: Callable[[Client, Worker], Awaitable[float]],
        seconds: float = 0.0,
    ) -> None:
        if question.name in worker.polls:
            return
        polling = self.polling
        worker.polls[question.name] = polling.poll(
            question, worker.name, lambda: ask(polling.client, worker), seconds
        )

    def _delay_seconds(self, name: str) -> float:
        """Returns how late a worker's events are, as far as is known."""
        worker = self._table.get(name)
        upstream = None if worker is None else worker.upstream
        return 0.0 if upstream is None else upstream.load.speed.delay_seconds

    def _feed_loads(self, name: str) -> list[tuple[EngineLoad, float]]:
        """Returns the last load that each of a worker's feeds reported, with its age in seconds."""
        reported = self._feeds.loads(name)
        return [(one.load, one.age_seconds) for one in reported if one is not None]

    def _sign_of_life(self, name: str) -> tuple[bool, int]:
        """Returns whether a worker's feed has no connection, and its number of batches so far."""
        is_cut = self._feeds.state(name) in (FeedState.STALE, FeedState.CONNECTING)
        return is_cut, self._feeds.batches(name)
