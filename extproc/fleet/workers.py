"""The fleet: the one table that owns the workers' records, and what happens to a worker."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from extproc.base import address
from extproc.base.attention import has_hybrid_files
from extproc.base.engine import RUST
from extproc.base.fault import Fault
from extproc.config.feed_kinds import at_address
from extproc.config.schema import AUTO, Config, WorkerEvents
from extproc.fleet.asking_times import USUAL, AskingTimes
from extproc.fleet.candidates import Candidates
from extproc.fleet.discovery.view import STATIC, listed, merged
from extproc.fleet.discovery.view import Fleet as Members
from extproc.fleet.feeds import Feeds, OpenTransports
from extproc.fleet.identifying import Identifying
from extproc.fleet.lanes import Lanes
from extproc.fleet.learning import Learning
from extproc.fleet.polling import Client
from extproc.fleet.questions import Questions
from extproc.fleet.rank_pins import RankPins
from extproc.fleet.record import FeedPlan, Table, Worker
from extproc.fleet.resolving import LookUp, Resolving, addresses_of
from extproc.fleet.reuse import Reuse
from extproc.fleet.sleeping import Sleeping
from extproc.fleet.states import States
from extproc.fleet.strays import Strays
from extproc.fleet.verifying import Verifying
from extproc.fleet.worker_faults import WorkerFaults
from extproc.proof.golden_forms import FormEncoder
from extproc.proof.trust import Proofs
from extproc.requests.dialect import Dialect, Printed, rivals_of
from extproc.routing.load import Loads
from extproc.routing.pins import PinFindings
from extproc.routing.placing import ClaimReporter
from kvstate.fleet import FollowedWorkers
from kvstate.media import MediaFold, StoreListener

log = logging.getLogger("kvsteer.workers")


def _no_fault(_: str) -> str:
    return ""


class Workers:
    """All workers.

    open_transports: opens a worker's event source, one transport for each rank. source_fault:
    returns what is wrong with a source of workers, by its name; "" if nothing is. chance: returns
    0 to 1, for jitter. monotonic: seconds; the clock of the loads. telling: reports requests to
    other routers, None if routers do not share. tokenizers: local ones, by model.
    make_client: makes the HTTP client that asks the workers. times: how often it does.

    records: by name. upstreams: the records of their endpoints. loads: their load. proofs: the
    state of their tokens. verifying: compares their tokens with the router's. identifying: knows
    their engines. candidates: what a picker sees of them. lanes: what Envoy sees of them. states:
    what the operator sees of them. questions: what they are asked. strays: whether requests reach
    them. faulty: what is wrong with them. sleeping: which of them sleep.
    """

    def __init__(
        self,
        config: Config,
        fleet: FollowedWorkers,
        open_transports: OpenTransports,
        source_fault: Callable[[str], str] = _no_fault,
        chance: Callable[[], float] = random.random,
        monotonic: Callable[[], float] = time.monotonic,
        telling: ClaimReporter | None = None,
        *,
        tokenizers: Mapping[str, FormEncoder] | None = None,
        make_client: Callable[[], Client] = Client,
        times: AskingTimes = USUAL,
        look_up: LookUp = addresses_of,
    ) -> None:
        self.telling = telling
        self._fleet = fleet
        self._config = config
        self.monotonic = monotonic
        self._table = table = Table(merged({STATIC: listed(config.workers)}))
        self.records: Mapping[str, Worker] = table.by_name
        self.upstreams = table.upstreams
        rate = config.policy.cost.prefill_tokens_per_second
        touched = None if telling is None else telling.touched
        self.loads = Loads(self.upstreams.loads, rate, touched, learns=config.policy.learn)
        self.pins = pins = RankPins(config, table, fleet, monotonic)
        self.candidates = candidates = Candidates(config, table, fleet, self.loads, pins)
        self.proofs = Proofs(fleet, self.records, monotonic, candidates.block_size)
        model_of = candidates.model_of
        hybrids = {
            one.name
            for one in config.models
            if isinstance(one.tokenizer, str) and has_hybrid_files(one.tokenizer)
        }
        self.reuse = Reuse(fleet, self.records, lambda worker: model_of(worker) in hybrids)
        note_followed = self.reuse.note_followed
        self.sleeping = Sleeping(table, fleet.batches, note_followed, monotonic)
        self.lanes = Lanes(table, config.disaggregation, model_of)
        self.verifying = Verifying(
            table,
            config.models,
            tokenizers or {},
            model_of,
            self.proofs,
            chance,
            monotonic,
            candidates.dialect_of,
            self._speak,
            times,
        )
        self.proofs.watch(self._try_rival)
        self._learning = Learning(
            config.models, self._note_learned, chance, times.model_retry_seconds
        )
        self.identifying = Identifying(table, chance, monotonic, times)
        self.questions = Questions(
            config,
            table,
            fleet,
            candidates,
            self.verifying,
            self._learning,
            self.identifying,
            pins,
            chance,
            monotonic,
            make_client,
            self.sleeping,
        )
        self._resolving = Resolving(table, self.note_moved, times, look_up)
        self._feeds = Feeds(
            config,
            fleet,
            table,
            self.questions.polling,
            self._feed_plan,
            open_transports,
            pins,
            self.reuse,
            times,
        )
        self.strays = Strays(table, monotonic)
        self.states = States(
            table,
            fleet,
            candidates,
            self.proofs,
            pins,
            self.reuse,
            self.strays,
            self._feeds,
            source_fault,
            monotonic,
            config.disaggregation,
        )
        self.faulty = WorkerFaults(table, fleet, self._feeds, self.states.down, monotonic)
        self._learned_more = False
        self._following: asyncio.Task[None] | None = None
        self.identifying.watch(self._note_engine)

    @property
    def fold(self) -> MediaFold:
        """What brings media into the ids of tokens, for prompts that are looked up."""
        return self._fleet.fold

    def store_blocks(self) -> Iterable[tuple[str, int]]:
        """Returns the name of each store that workers share, and how many blocks it has."""
        return self._fleet.stores.blocks()

    def store_events(self) -> Iterable[tuple[str, Mapping[str, int]]]:
        """Returns the name of each store that publishes events, and how many came, by kind."""
        return self._fleet.store_events()

    def listen(self, listener: StoreListener) -> None:
        """Has the stores of all workers told to a listener."""
        self._fleet.listen(listener)

    async def start(self) -> None:
        """Resolves names once, then keeps them resolved; asks the workers; follows their feeds."""
        await self._resolving.start()
        self.questions.start()
        await self._feeds.follow()
        await self.enable_events(enabled=self._config.events.enabled)

    async def close(self) -> None:
        """Stops following and asking the workers."""
        await self._resolving.close()
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        self.questions.stop()
        await self._feeds.close()
        await self.questions.polling.close()

    async def replace(self, members: Members) -> None:
        """Replaces the list of workers; unchanged ones are not touched."""
        before = {worker.name: worker.sighting for worker in self._table}
        changes = self._table.replace(members)
        for worker in self._table:
            self.questions.ask(worker)
            if before.get(worker.name) not in (None, worker.sighting):
                self._learning.ask_now(worker)
        self._resolving.run_if_needed()
        self.candidates.note_change()
        await self._feeds.follow(changes.removed)

    def faults(self) -> Iterator[Fault | None]:
        """Yields what is wrong with workers and their feeds."""
        yield from self.faulty.faults()
        yield from self.sleeping.faults()
        yield from self._feeds.faults()
        yield from self.proofs.faults()
        yield from self.identifying.faults()
        yield from self.verifying.faults()

    def drain(self, name: str, *, draining: bool) -> bool:
        """Starts or ends draining a worker; returns whether it exists.

        name: its configured name, or its ip:port.
        """
        meant = [worker for worker in self._table if name in (worker.name, worker.endpoint)]
        for worker in meant:
            worker.is_drained = draining
            log.info("worker %s: %s", worker.name, "drains" if draining else "gets requests again")
        self.candidates.note_change()
        return bool(meant)

    async def enable_events(self, *, enabled: bool) -> None:
        """Switches events on or off: without them, every worker counts as publishing none."""
        await self._feeds.enable(enabled=enabled)

    @property
    def events_enabled(self) -> bool:
        """Whether the workers' events are followed."""
        return self._feeds.enabled

    def _note_engine(self, name: str) -> None:
        """Notes that a worker's engine changed: what was proved for its releases counts no more."""
        worker = self.records.get(name)
        if worker is not None:
            self.proofs.note_engine(worker)
            worker.printed = None
            worker.pin_findings = PinFindings()
            self.reuse.note_engine(worker)
            self.pins.note_change()
        self.candidates.note_change()
        if worker is None or worker.engine is None:
            return
        was_early = worker.questioned.dialect is None and worker.questioned.at > -math.inf
        if worker.engine.front_end == RUST or was_early:
            self.verifying.ask_now(worker)  # what it was asked as another one proves little

    def _speak(self, worker: Worker, dialect: Dialect) -> None:
        """Notes which dialect a worker has shown."""
        self.note_printed(worker, dialect.tools)

    def note_printed(self, worker: Worker, printed: Printed) -> None:
        """Notes how a worker prints the tools of responses."""
        worker.printed = printed
        self.proofs.note_printing(worker)
        self.candidates.note_change()

    def _try_rival(self, name: str) -> None:
        """Tries the next way of printing tools at a worker that does not print them so."""
        worker = self.records.get(name)
        dialect = None if worker is None else self.candidates.dialect_of(worker)
        rivals = () if dialect is None else rivals_of(dialect)
        if worker is not None and rivals:
            self._speak(worker, rivals[0])

    def _feed_plan(self, worker: Worker) -> FeedPlan | None:
        """Returns a worker's feed as it should be followed.

        None also if its model is unknown, or its host name is not resolved.
        """
        model, found = self.candidates.model_of(worker), worker.sighting
        events, upstream = found.worker.events, worker.upstream
        if not model or upstream is None:
            return None
        if events != AUTO and not isinstance(events, WorkerEvents):
            return None
        if worker.place.is_ip:
            return FeedPlan(model, events, found.identity, found.adapters)
        host = address.parse(upstream.endpoint).host
        if isinstance(events, WorkerEvents):
            events = at_address(events, worker.place.host, host)
        return FeedPlan(model, events, found.identity, found.adapters, host)

    def _note_learned(self) -> None:
        """Follows feeds again: a worker's feed can be followed once its model is known."""
        self.candidates.note_change()
        for worker in self._table:
            self.verifying.expect(worker)
        self._follow_soon()

    def _follow_soon(self) -> None:
        self._learned_more = True
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow_as_learned())

    async def _follow_as_learned(self) -> None:
        while self._learned_more:
            self._learned_more = False
            await self._feeds.follow()

    def note_emptied(self, name: str) -> None:
        """Notes that a worker reported the loss of its whole cache."""
        worker = self.records.get(name)
        if worker is not None:
            worker.holdings.lose(self.monotonic())
            self._note_restart(worker)

    def note_cut(self, name: str) -> None:
        """Notes that a worker's feed lost its connection, mostly because the worker died.

        Until a health probe, it computes prompts for other workers only if no other can: a request
        that names a dead worker cannot be saved by a retry.
        """
        worker = self.records.get(name)
        if worker is not None:
            self.upstreams.doubt(worker.endpoint, is_doubted=True)

    def _note_restart(self, worker: Worker) -> None:
        """Notes that a worker may have been restarted with other files."""
        self.proofs.restarted(worker)
        self.verifying.ask_now(worker)
        self.identifying.ask_now(worker)

    def note_moved(self, worker: Worker, endpoint: str) -> None:
        """Notes that a worker has another address."""
        self._table.move(worker, endpoint)
        self._learning.ask_now(worker)
        self._note_restart(worker)
        self.candidates.note_change()
        self._follow_soon()
