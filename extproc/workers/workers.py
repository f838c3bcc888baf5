"""The fleet as the rest of the router sees it: who may be picked, and what each worker holds."""

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

from extproc.address import Address
from extproc.checking.watch import SelfCheck
from extproc.config.schema import AUTO, Config, WorkerEvents
from extproc.config.sections import BOTH, PREFILL
from extproc.discovery.view import STATIC, listed, merged
from extproc.discovery.view import Fleet as Members
from extproc.observing.elsewhere import NOBODY_FOLLOWED
from extproc.observing.outcomes import Circumstances, Outcome
from extproc.picking.eligibility import Candidate
from extproc.picking.load import Load, Loads
from extproc.picking.placing import Telling
from extproc.picking.sent import Holdings
from extproc.tokenizing.remote_tokenizer import Failures
from extproc.workers.asking import Computed, Doubts, HealthProbe, LoadReports, Pace
from extproc.workers.feeds import Feeds, OpenTransports, feed_shown
from extproc.workers.learning import Learning
from extproc.workers.polling import Client, Polling, Question
from extproc.workers.record import Learned, Table, Wanted, Worker
from extproc.workers.verifying import Encoder, Verifying
from kvstate.events import EngineLoad
from kvstate.feeds.feed import State
from kvstate.fleet import Fleet
from kvstate.overlap import Overlap, Prompt, Tier

log = logging.getLogger("kvsteer.workers")


def _no_fault(_: str) -> str:
    return ""


class _Asked(Protocol):
    """A question that every worker is asked at a pace."""

    pace: Pace
    question: Question

    async def ask(self, client: Client, worker: Worker) -> float:
        """Asks once; returns the seconds until the worker is asked again."""


class Workers:
    """All workers.

    open_transports: opens a worker's event source, one transport for each rank. source_fault:
    returns what is wrong with a source of workers, by its name; "" if nothing is. chance: returns
    0 to 1, for jitter. monotonic: seconds; the clock of the loads. checks: the self-check of their
    tokens. records: by name. upstreams: the records of their endpoints. loads: their load. telling:
    reports requests to other routers, None if routers do not share. tokenizers: local ones, by
    model. verifying: compares their tokens with the workers'.
    """

    def __init__(  # noqa: PLR0913 - the root of all that is known of workers
        self,
        config: Config,
        fleet: Fleet,
        open_transports: OpenTransports,
        source_fault: Callable[[str], str] = _no_fault,
        chance: Callable[[], float] = random.random,
        monotonic: Callable[[], float] = time.monotonic,
        telling: Telling | None = None,
        *,
        tokenizers: Mapping[str, Encoder] | None = None,
    ) -> None:
        self.telling = telling
        self._config = config
        self._fleet = fleet
        self._source_fault = source_fault
        self.monotonic = monotonic
        self._table = table = Table(merged({STATIC: listed(config.workers)}))
        self.records: Mapping[str, Worker] = table.by_name
        self.upstreams = table.upstreams
        rate = config.policy.cost.prefill_tokens_per_second
        touched = None if telling is None else telling.touched
        self.loads = Loads(self.upstreams.loads, rate, touched, learns=config.policy.learn)
        self.checks = SelfCheck(fleet, self.records, monotonic)

        policy = config.policy
        reports = LoadReports(
            table,
            self.loads,
            self._feed_loads,
            Pace(policy.scrape_interval_ms / 1000, chance, monotonic),
            monotonic,
        )
        self._asked: list[_Asked] = [reports] if policy.scrape_interval_ms else []
        self._polling = Polling()
        self._computed = Computed(table, self.loads, fleet.overlaps, fleet.batches, monotonic)
        self._looks = [reports.look]
        if policy.probe_interval_ms is None:
            doubts = Doubts(table, self._polling, self._sign_of_life, monotonic)
            self._looks.append(doubts.look)
        elif policy.probe_interval_ms:
            pace = Pace(policy.probe_interval_ms / 1000, chance, monotonic)
            self._asked.append(HealthProbe(table, pace, monotonic))
        self._learning = Learning(config.models, self._note_learned, chance)
        self.verifying = Verifying(
            *(table, config.models, tokenizers or {}, self._model_of),
            lambda worker, told: self.checks.judge(worker.check, told),
            *(chance, monotonic),
        )
        self._resolving = Resolving(table, self._note_moved)
        self._feeds = Feeds(config, fleet, table, self._polling, self._wanted, open_transports)
        self._learned_more = False
        self._following: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._candidates: dict[str, list[Candidate]] = {}  # by model, until anything changes
        self._draining: set[str] | None = None  # until anything changes
        self._has_roles: bool | None = None  # until anything changes

    async def start(self) -> None:
        """Resolves names once, then keeps them resolved; asks the workers; follows their feeds."""
        await self._resolving.start()
        for worker in self._table:
            self._ask(worker)
        self._polling.start(self._looks)
        if self._config.policy.learn:
            self._polling.run(self._computed.keep_looking())
        await self._feeds.follow()
        await self.enable_events(enabled=self._config.events.enabled)

    async def close(self) -> None:
        """Stops following and asking the workers."""
        await self._resolving.close()
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        for worker in self._table:
            for question in list(worker.polls):
                worker.stop_asking(question)
        await self._feeds.close()
        await self._polling.close()

    async def replace(self, members: Members) -> None:
        """Replaces the list of workers; unchanged ones are not touched."""
        before = {worker.name: worker.found for worker in self._table}
        changes = self._table.replace(members)
        for worker in self._table:
            self._ask(worker)
            if before.get(worker.name) not in (None, worker.found):
                self._learning.ask_now(worker)
        self._resolving.run_if_needed()
        self._note_change()
        await self._feeds.follow(changes.gone)

    def _ask(self, worker: Worker) -> None:
        """Starts a worker's regular questions, and stops those that it no longer needs."""
        for one in self._asked:
            self._poll(worker, one.question, one.ask, one.pace.first_seconds())
        verifying, learning = self.verifying, self._learning
        if verifying.is_needed:
            verifying.expect(worker)
            self._poll(worker, verifying.question, verifying.ask, verifying.first_seconds())
        if worker.found.worker.learn:
            self._poll(worker, learning.question, learning.ask)
        else:
            worker.stop_asking(learning.question.name)
            worker.learned = Learned()

    def _poll(
        self,
        worker: Worker,
        question: Question,
        ask: Callable[[Client, Worker], Awaitable[float]],
        seconds: float = 0.0,
    ) -> None:
        if question.name in worker.polls:
            return
        polling = self._polling
        worker.polls[question.name] = polling.poll(
            question, worker.name, lambda: ask(polling.client, worker), seconds
        )

    def circumstances(self, outcome: Outcome) -> Circumstances:
        """Returns facts that may explain a wrong prediction for a worker."""
        name, prompt = outcome.worker, outcome.prompt
        return Circumstances(
            self.state(name),
            tokens_differ=self.checks.status(name)["differs"],
            block_size=self.block_size(name),
            ranks=self._fleet.ranks(name),
            held={} if prompt is None else self._fleet.overlaps(prompt),
        )

    def drain(self, name: str, *, draining: bool) -> bool:
        """Starts or ends draining a worker; returns whether it exists.

        name: its configured name, or its ip:port.
        """
        meant = [worker for worker in self._table if name in (worker.name, worker.endpoint)]
        for worker in meant:
            worker.is_drained = draining
            log.info("worker %s: %s", worker.name, "drains" if draining else "gets requests again")
        self._note_change()
        return bool(meant)

    async def enable_events(self, *, enabled: bool) -> None:
        """Switches events on or off: without them, every worker counts as publishing none."""
        await self._feeds.enable(enabled=enabled)

    @property
    def events_enabled(self) -> bool:
        """Returns whether the workers' events are followed."""
        return self._feeds.enabled

    def next_change(self) -> asyncio.Event:
        """Returns an event that is set at the next change of candidates; get it before reading."""
        return self._changed

    def overlaps(self, prompt: Prompt) -> Mapping[str, Overlap]:
        """Returns the overlap of every worker that holds the prompt's first block, by name."""
        return self._fleet.overlaps(prompt)

    def candidates(self, model: str) -> list[Candidate]:
        """Returns every worker as a candidate for requests to a model."""
        known = self._candidates.get(model)
        if known is None:
            is_listed = any(
                worker.learned.adapters and self._model_of(worker) == model
                for worker in self._table
            )
            known = self._candidates[model] = [
                self._candidate(worker, model, is_listed=is_listed) for worker in self._table
            ]
        return known

    def _candidate(self, worker: Worker, model: str, *, is_listed: bool) -> Candidate:
        excluded = worker.found.excluded
        serves = self._model_of(worker)
        if serves != model:
            excluded = f"serves {serves}" if serves else "its model is not known yet"
        elif worker.upstream is None:
            excluded = "its host name could not be resolved"
        adapters = _adapters(worker, is_listed=is_listed)
        given = worker.found.worker
        return Candidate(
            *(worker.name, worker.endpoint, excluded, adapters, given.role, given.transfer_port)
        )

    @property
    def has_roles(self) -> bool:
        """Returns whether any worker takes only a part of requests."""
        if self._has_roles is None:
            self._has_roles = any(one.found.worker.role != BOTH for one in self._table)
        return self._has_roles

    def endpoints(self, model: str) -> list[str]:
        """Returns ip:port of the workers that serve a model now."""
        return [one.endpoint for one in self.candidates(model) if not one.excluded]

    def tokenizers(self, model: str) -> dict[str, Failures]:
        """Returns the failures to tokenize of the workers that serve a model now, by ip:port."""
        return {
            one.endpoint: self.records[one.name].tokenizer
            for one in self.candidates(model)
            if not one.excluded
        }

    def names(self) -> set[str]:
        """Returns the names of all workers."""
        return set(self.records)

    def places(self) -> list[tuple[str, str]]:
        """Returns name and ip:port of every worker that has an address now."""
        return [(one.name, one.endpoint) for one in self._table if one.upstream is not None]

    def model_of(self, name: str) -> str | None:
        """Returns the model that a worker serves; None while it is unknown."""
        return self._model_of(self.records[name])

    def _model_of(self, worker: Worker) -> str | None:
        model = worker.found.worker.model or worker.learned.model
        only = self._config.models[0].name if len(self._config.models) == 1 else None
        return model or only

    def draining(self) -> set[str]:
        """Returns the endpoints of the workers that get no new requests."""
        if self._draining is None:
            self._draining = {one.endpoint for one in self._table if one.is_draining}
        return self._draining

    def lanes(self) -> dict[str, list[tuple[str, bool]]]:
        """Returns, by model, ip:port of each answering worker, and whether it takes new requests.

        Envoy itself sends none to a worker that cannot answer without a prefill worker.
        """
        disaggregation = self._config.disaggregation
        lanes: dict[str, list[tuple[str, bool]]] = {}
        for worker in self._table:
            if worker.upstream is not None and worker.found.worker.role != PREFILL:
                is_open = not (worker.is_draining or worker.found.excluded)
                is_open &= disaggregation.answers_alone(worker.found.worker.role)
                lane = (worker.endpoint, is_open)
                lanes.setdefault(self._model_of(worker) or "", []).append(lane)
        return lanes

    def prefill_lanes(self) -> dict[str, list[tuple[str, bool]]]:
        """Returns the same for each worker that computes prompts for others."""
        lanes: dict[str, list[tuple[str, bool]]] = {}
        for worker in self._table:
            if worker.upstream is not None and worker.found.worker.role == PREFILL:
                lane = (worker.endpoint, not (worker.is_draining or worker.found.excluded))
                lanes.setdefault(self._model_of(worker) or "", []).append(lane)
        return lanes

    def unplaced(self) -> set[str] | None:
        """Returns ip:port of the workers of unknown model; None while any worker has no address."""
        if any(worker.upstream is None for worker in self._table):
            return None
        return {one.endpoint for one in self._table if self._model_of(one) is None}

    def state(self, name: str) -> str:
        """Returns the state of a worker's feeds."""
        return self._fleet.state(name).value

    def ranks(self, name: str) -> int:
        """Returns how many ranks a worker has; 0 if unknown."""
        return self._fleet.ranks(name)

    @property
    def names_ranks(self) -> bool:
        """Returns whether requests may name the rank that computes them."""
        return self._fleet.names_ranks

    def holdings(self, name: str) -> Holdings:
        """Returns the record of what was sent to a worker; an unused one if it was removed."""
        worker = self.records.get(name)
        return Holdings(name) if worker is None else worker.holdings

    def in_flight(self, endpoint: str) -> int:
        """Returns this router's requests in flight on an endpoint."""
        return self.loads.in_flight(endpoint)

    def tokens_per_second(self, name: str) -> float:
        """Returns how many prompt tokens a worker computes in a second; 0 if it is unknown."""
        worker = self.records.get(name)
        return 0.0 if worker is None else self.loads.tokens_per_second(worker.endpoint)

    def load(self, endpoint: str) -> Load:
        """Returns the current load of an endpoint."""
        return self.loads.load(endpoint, self.monotonic())

    def down(self, endpoint: str) -> str:
        """Returns why an endpoint is down, "" if it is not."""
        return self.upstreams.reason(endpoint, self.monotonic())

    def served(self, name: str, *, is_elsewhere: bool) -> None:
        """Notes who answered a request that was steered to a worker: itself, or another one."""
        worker = self.records.get(name)
        if worker is not None:
            worker.outcomes.answers.note(is_elsewhere=is_elsewhere)

    def astray(self, name: str) -> str:
        """Returns why requests steered to a worker are answered elsewhere, "" if they are not."""
        worker = self.records.get(name)
        if worker is None:
            return ""
        return worker.outcomes.answers.cause(
            lambda: (one.outcomes.answers for one in self._table),
            is_down=bool(self.down(worker.endpoint)),
        )

    def why_astray(self) -> str:
        """Returns why requests are answered elsewhere, for the worker with the most of them."""
        strays = [one for one in self._table if self.astray(one.name)]
        worst = max(strays, key=lambda one: one.outcomes.answers.share, default=None)
        cause = "" if worst is None else self.astray(worst.name)
        if worst is None or cause == NOBODY_FOLLOWED:
            return cause
        return f"{worst.endpoint}{f' and {len(strays) - 1} more' * (len(strays) > 1)}: {cause}"

    def index_bytes(self) -> int:
        """Returns the memory of the block index."""
        return self._fleet.index_bytes()

    def replays_done(self) -> bool:
        """Returns whether no feed is connecting or replaying."""
        states = {self._fleet.state(name) for name in self.records}
        return states.isdisjoint((State.CONNECTING, State.REPLAYING))

    def status(self) -> list[dict[str, Any]]:
        """Returns the answer of GET /workers, all at one moment."""
        return list(self.statuses())

    def statuses(self) -> Iterator[dict[str, Any]]:
        """Yields the same one worker after the other, each as it is when it is reached.

        Workers that are added or removed meanwhile are left out.
        """
        for name in list(self.records):
            worker = self.records.get(name)
            if worker is not None:
                yield self._status(worker)

    def fills(self) -> Iterator[tuple[str, int, int]]:
        """Yields the name, requests in flight and blocks of one worker after the other."""
        for worker in list(self._table):
            blocks = sum(self._fleet.blocks_by_tier(worker.name))
            yield worker.name, self.in_flight(worker.endpoint), blocks

    def _status(self, worker: Worker) -> dict[str, Any]:
        name, endpoint = worker.name, worker.endpoint
        tiers = self._fleet.blocks_by_tier(name)
        adapters = _adapters(worker, is_listed=True)
        return {
            "endpoint": endpoint,
            "name": name,
            "model": self._model_of(worker) or "",
            "state": self.state(name),
            "reason": self._reason(worker),
            "block_size": self.block_size(name),
            "feeds": [feed_shown(status) for status in self._fleet.feeds(name)],
            "blocks_by_tier": {
                tier.name.lower(): count for tier, count in zip(Tier, tiers, strict=True)
            },
            "in_flight": self.in_flight(endpoint),
            "speed": self.loads.speed_shown(endpoint),
            "tokens": self.checks.status(name),
            "predictions": worker.outcomes.drift.shown(),
            "lora": None if adapters is None else sorted(adapters),
            "role": worker.found.worker.role,
            "failed_halves": worker.upstream.failed_halves if worker.upstream else 0,
            "draining": worker.is_draining,
            "down": self.down(endpoint),
            "astray": self.astray(name),
            "excluded": worker.found.excluded,
            "source": worker.member.source,
            "source_fault": self._source_fault(worker.member.source),
        }

    def _reason(self, worker: Worker) -> str:
        """Returns why a worker has no feed, "" if it has one."""
        if self.events_enabled and self._model_of(worker) is None:
            return "its model is not known yet"
        return self._feeds.reason(worker)

    def block_size(self, name: str) -> int:
        """Returns the tokens in a worker's block: by its events, else as configured or reported."""
        told = self._fleet.block_size(name)
        if told is not None:
            return told
        worker = self.records.get(name)
        if worker is None:
            return 1
        given = worker.found.worker.block_size or worker.learned.block_size
        return given or self._config.policy.block_size

    def _feed_loads(self, name: str) -> list[tuple[EngineLoad, float]]:
        """Returns the last load that each of a worker's feeds reported, with its age in seconds."""
        said = self._fleet.loads(name)
        return [(one.load, one.age_seconds) for one in said if one is not None]

    def _sign_of_life(self, name: str) -> tuple[bool, int]:
        """Returns whether a worker's feed has no connection, and its number of batches so far."""
        is_cut = self._fleet.state(name) in (State.STALE, State.CONNECTING)
        return is_cut, self._fleet.batches(name)

    def _wanted(self, worker: Worker) -> Wanted | None:
        """Returns a worker's feed as it should be followed; None also if its model is unknown."""
        model, found = self._model_of(worker), worker.found
        events = found.worker.events
        if model and (events == AUTO or isinstance(events, WorkerEvents)):
            return Wanted(model, events, found.identity, found.adapters)
        return None

    def _note_learned(self) -> None:
        """Follows feeds again: a worker's feed can be followed once its model is known."""
        self._note_change()
        self._learned_more = True
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow_as_learned())

    async def _follow_as_learned(self) -> None:
        while self._learned_more:
            self._learned_more = False
            await self._feeds.follow()

    def emptied(self, name: str) -> None:
        """Notes that a worker reported the loss of its whole cache."""
        self.holdings(name).lose(self.monotonic())
        worker = self.records.get(name)
        if worker is not None:  # it may have been restarted
            self.verifying.ask_now(worker)

    def cut(self, name: str) -> None:
        """Notes that a worker's feed lost its connection, mostly because the worker died.

        Until a health probe, it computes prompts for other workers only if no other can: a request
        that names a dead worker cannot be saved by a retry.
        """
        worker = self.records.get(name)
        if worker is not None:
            self.upstreams.doubt(worker.endpoint, is_doubted=True)

    def _note_moved(self, worker: Worker, endpoint: str) -> None:
        """Notes that a worker has another address."""
        self._table.move(worker, endpoint)
        self._learning.ask_now(worker)
        self.verifying.ask_now(worker)
        self._note_change()

    def _note_change(self) -> None:
        self._candidates.clear()
        self._draining = self._has_roles = None
        self._changed.set()
        self._changed = asyncio.Event()


def _adapters(worker: Worker, *, is_listed: bool) -> frozenset[str] | None:
    """Returns the adapters that a worker serves; None for all of its model's.

    is_listed: whether any worker of the model lists adapters. If none does, a list without adapters
    means nothing: some engines list only models.
    """
    given = worker.found.worker.lora
    if given is not None:
        return frozenset(given)
    told = worker.learned.adapters
    return told if told or is_listed else None


# How often host names are looked up again; Envoy's own DNS clusters do it every 5 s.
RESOLVE_INTERVAL_SECONDS = 5.0

# How long start-up waits for the first answers; a silent resolver must not delay it further.
FIRST_RESOLVE_SECONDS = 2.0


class Resolving:
    """Keeps the host names of workers resolved, once started.

    moved: called with a worker's new ip:port whenever that changes.
    """

    def __init__(self, table: Table, moved: Callable[[Worker, str], None]) -> None:
        self._table = table
        self._moved = moved
        self._task: asyncio.Task[None] | None = None
        self._resolved_once = asyncio.Event()
        self._is_started = False

    async def start(self) -> None:
        """Looks up all names, and keeps doing so; waits a limited time for the first answers."""
        self._is_started = True
        self.run_if_needed()
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._resolved_once.wait(), FIRST_RESOLVE_SECONDS)

    async def close(self) -> None:
        """Stops looking names up."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def run_if_needed(self) -> None:
        """Begins if it was started and there are names to look up."""
        if self._is_started and self._task is None and self._named():
            self._task = asyncio.create_task(self._keep_resolved())

    def _named(self) -> list[Worker]:
        return [worker for worker in self._table if not worker.place.is_ip]

    async def _keep_resolved(self) -> None:
        while True:
            try:
                await asyncio.gather(*(self._resolve(worker) for worker in self._named()))
            except Exception:  # a failed look-up must not end the others
                log.exception("workers: a name cannot be looked up")
            self._resolved_once.set()
            await asyncio.sleep(RESOLVE_INTERVAL_SECONDS)

    async def _resolve(self, worker: Worker) -> None:
        """Looks up a host name; the last address found remains if none is found now."""
        loop, place = asyncio.get_running_loop(), worker.place
        try:
            found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:  # ValueError: it cannot be a host name
            if worker.upstream is None:
                log.warning("worker %s: cannot be resolved yet: %s", worker.name, error)
            return
        endpoints = sorted({str(Address(str(entry[4][0]), place.port)) for entry in found})
        is_there = self._table.has(worker)  # it may have gone meanwhile
        if endpoints and is_there and worker.endpoint not in endpoints:
            log.info("worker %s resolves to %s", worker.name, endpoints[0])
            self._moved(worker, endpoints[0])
