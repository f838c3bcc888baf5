"""What every worker is asked, and how often."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from extproc.config.schema import Config
from extproc.fleet.asking.ask_interval import AskInterval
from extproc.fleet.asking.polling import Client, Polling, Question
from extproc.fleet.candidates import Candidates
from extproc.fleet.feeds.rank_pins import RankPins
from extproc.fleet.health.doubts import Doubts
from extproc.fleet.health.health_probe import HealthProbe
from extproc.fleet.health.sleeping import Sleeping
from extproc.fleet.identity.identifying import Identifying
from extproc.fleet.identity.learning import Learning
from extproc.fleet.load.computed import Computed
from extproc.fleet.load.load_reports import LoadReports
from extproc.fleet.load.pull_arrivals import PullArrivals
from extproc.fleet.proof.verifying import Verifying
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import SelfReport, Worker
from kvstate.events import EngineLoad
from kvstate.feeds.feed import FeedState
from kvstate.fleet import FollowedWorkers


class _RegularQuestion(Protocol):
    """A question that every worker is asked once an interval."""

    interval: AskInterval
    question: Question

    async def ask(self, client: Client, worker: Worker) -> float:
        """Asks once; returns the seconds until the worker is asked again."""


class Questions:
    """Asks workers for their load, their health, what they serve and how they tokenize.

    verifying, learning, identifying: three of the questions. chance: returns 0 to 1, for jitter.
    monotonic: seconds; the clock of the loads. make_client: makes the HTTP client. regular: the
    questions that every worker is asked once an interval. polling: carries out all questions, also
    those of the feeds. pulls: looks when workers have what they pull from others.
    """

    def __init__(
        self,
        config: Config,
        table: Table,
        fleet: FollowedWorkers,
        candidates: Candidates,
        verifying: Verifying,
        learning: Learning,
        identifying: Identifying,
        pins: RankPins,
        chance: Callable[[], float],
        monotonic: Callable[[], float],
        make_client: Callable[[], Client],
        sleeping: Sleeping,
    ) -> None:
        self._table = table
        self._fleet = fleet
        self._verifying = verifying
        self._learning = learning
        self._identifying = identifying
        self.polling = Polling(make_client)
        policy, loads = config.policy, candidates.loads
        reports = LoadReports(
            table,
            loads,
            self._feed_loads,
            AskInterval(policy.scrape_interval_ms / 1000, chance, monotonic),
            monotonic,
            sleeping.note,
        )
        self.regular: list[_RegularQuestion] = [reports] if policy.scrape_interval_ms else []
        computed = Computed(
            table,
            loads,
            fleet.blocks.overlaps,
            fleet.feeds.batches,
            candidates.block_size,
            monotonic,
        )
        self.pulls = PullArrivals(fleet.blocks.overlaps, self._delay_seconds, monotonic)
        self._looks = [reports.look]
        if policy.probe_interval_ms is None:
            doubts = Doubts(table, self.polling, self._sign_of_life, monotonic, sleeping.ask)
            self._looks.append(doubts.look)
        elif policy.probe_interval_ms:
            interval = AskInterval(policy.probe_interval_ms / 1000, chance, monotonic)
            self.regular.append(HealthProbe(table, interval, monotonic))
        self._looks += [identifying.look, pins.look]
        if policy.learn:
            self._looks.append(computed.look)
        if config.disaggregation.price_pulls:
            self._looks.append(self.pulls.look)

    def start(self) -> None:
        """Asks every worker, and looks at what needs no answer."""
        for worker in self._table:
            self.ask(worker)
        self.polling.start(self._looks)

    def stop(self) -> None:
        """Asks no worker any more."""
        for worker in self._table:
            for question in list(worker.polls):
                worker.stop_asking(question)

    def ask(self, worker: Worker) -> None:
        """Starts a worker's regular questions, and stops those that it no longer needs."""
        for one in self.regular:
            self._poll(worker, one.question, one.ask, one.interval.first_seconds())
        verifying, learning, identifying = self._verifying, self._learning, self._identifying
        identifying.expect(worker)
        self._poll(worker, identifying.question, identifying.ask)
        verifying.expect(worker)
        if verifying.is_needed:
            self._poll(worker, verifying.question, verifying.ask, verifying.first_seconds())
        if worker.sighting.worker.learn:
            self._poll(worker, learning.question, learning.ask)
        else:
            worker.stop_asking(learning.question.name)
            worker.learned = SelfReport()

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
        reported = self._fleet.feeds.loads(name)
        return [(one.load, one.age_seconds) for one in reported if one is not None]

    def _sign_of_life(self, name: str) -> tuple[bool, int]:
        """Returns whether a worker's feed has no connection, and its number of batches so far."""
        is_cut = self._fleet.feeds.state(name) in (FeedState.STALE, FeedState.CONNECTING)
        return is_cut, self._fleet.feeds.batches(name)
