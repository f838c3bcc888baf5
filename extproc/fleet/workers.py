"""The fleet: the object that joins its parts, and what happens to a worker.

    part          what it is for                                            folder
    records       all state about workers, and the table that owns it       records/
    candidates    the fleet as a picker sees it                             .
    engines       which engine a worker runs, and what is proved of it      identity/, proof/
    questions     what workers are asked, and how often                     asking/, health/, load/
    feeds         the workers' feeds, which `kvstate.fleet` follows         feeds/
    lanes         the fleet as Envoy sees it without a pick                 .
    states        the fleet as the operator sees it                         .

Where workers come from is decided outside (`discovery/`): a list arrives by `replace`. All state
about one worker is in its record, so it goes with the worker; a part keeps only what is of no
single worker. Parts are given the others that they need, and reach none through this object. What
concerns several parts, such as a worker that moved or lost its cache, passes through this object.
Requests know the fleet by `candidates` and `upstreams`; nothing here knows a request but by its
outcome.
"""

import logging
from collections.abc import Callable, Iterator, Mapping

from extproc.base.fault import Fault
from extproc.config.schema import Config
from extproc.fleet.asking.surroundings import USUAL_SURROUNDINGS, Surroundings
from extproc.fleet.candidates import Candidates
from extproc.fleet.discovery.view import STATIC, listed, merged
from extproc.fleet.discovery.view import Fleet as Members
from extproc.fleet.engine_knowledge import EngineKnowledge
from extproc.fleet.feeds.feeds import Feeds, OpenTransports
from extproc.fleet.feeds.rank_pins import RankPins
from extproc.fleet.health.sleeping import Sleeping
from extproc.fleet.identity.learning import Learning
from extproc.fleet.identity.resolving import Resolving
from extproc.fleet.lanes import Lanes
from extproc.fleet.questions import Questions
from extproc.fleet.records.shared import SharedByFleet
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker
from extproc.fleet.states import States
from extproc.fleet.strays import Strays
from extproc.fleet.worker_faults import WorkerFaults
from extproc.proof.golden_forms import FormEncoder
from extproc.routing.ledger import ClaimReporter
from extproc.routing.load.loads import Loads
from kvstate.events import Loss
from kvstate.fleet import FollowedWorkers

log = logging.getLogger("kvsteer.workers")


def _no_fault(_: str) -> str:
    return ""


class Workers:
    """All workers.

    followed: what they hold, as known from their events. open_transports: opens a worker's event
    source, one transport for each rank. source_fault: returns what is wrong with a source of
    workers, by its name; "" if nothing is. reporter: reports requests to other routers, None if
    routers do not share. encoders: local tokenizers, by model. surroundings: time, chance and the
    network.
    """

    def __init__(
        self,
        config: Config,
        followed: FollowedWorkers,
        open_transports: OpenTransports,
        source_fault: Callable[[str], str] = _no_fault,
        reporter: ClaimReporter | None = None,
        *,
        encoders: Mapping[str, FormEncoder] | None = None,
        surroundings: Surroundings = USUAL_SURROUNDINGS,
    ) -> None:
        table = Table(merged({STATIC: listed(config.workers)}))
        shared = SharedByFleet(config, followed, table, surroundings)
        chance, monotonic, times = shared.chance, shared.monotonic, shared.times
        self.followed = followed
        self.reporter = reporter
        # The clock of the loads, in seconds.
        self.monotonic = monotonic
        # The records of workers by name, and those of their endpoints.
        self.records: Mapping[str, Worker] = table.by_name
        self.upstreams = table.upstreams
        # How much each endpoint has to do.
        self.loads = _loads(config, table, reporter)
        # The workers as a picker and as Envoy see them.
        pins = RankPins(config, table, followed, monotonic)
        self.candidates = Candidates(config, table, followed, self.loads, pins)
        self.lanes = Lanes(table, config.disaggregation, self.candidates.model_of)
        # What is known of their engines: which they are, whether their tokens are those computed
        # here, and which of them sleep.
        self.engines = EngineKnowledge(shared, self.candidates, encoders or {})
        self.proofs = self.engines.proofs
        batches, note_followed = followed.feeds.batches, self.engines.reuse.note_followed
        self.sleeping = Sleeping(table, batches, note_followed, monotonic)
        # What they are asked.
        retry_seconds = times.model_retry_seconds
        self._learning = Learning(config.models, self._note_learned, chance, retry_seconds)
        self.questions = Questions(
            shared, self.candidates, self.engines, self._learning, self.sleeping
        )
        self._resolving = Resolving(table, self.note_moved, times, surroundings.look_up)
        # Their feeds.
        self._feeds = Feeds(
            shared,
            self.candidates.model_of,
            self.questions.polling,
            open_transports,
            pins,
            self.engines.reuse,
        )
        # The workers as the operator sees them: whether requests reach them, their state, and what
        # is wrong with them.
        self.strays = Strays(table, monotonic)
        self.states = States(
            shared, self.candidates, self.engines, self._feeds, self.strays, source_fault
        )
        self._faults = WorkerFaults(table, followed, self._feeds, self.states.down, monotonic)
        self._table = table

    async def start(self) -> None:
        """Resolves names once, then keeps them resolved; asks the workers; follows their feeds."""
        await self._resolving.start()
        self.questions.start()
        await self._feeds.follow()
        await self.enable_events(enabled=self._feeds.are_configured)

    async def close(self) -> None:
        """Stops following and asking the workers."""
        await self._resolving.close()
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
        yield from self._faults.faults()
        yield from self.sleeping.faults()
        yield from self._feeds.faults()
        yield from self.proofs.faults()
        yield from self.engines.identifying.faults()
        yield from self.engines.verifying.faults()

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

    def note_emptied(self, name: str, why: Loss) -> None:
        """Notes that a worker reported the loss of its whole cache."""
        worker = self.records.get(name)
        if worker is not None:
            worker.holdings.lose(self.monotonic(), why)
            self.engines.note_restart(worker)

    def note_cut(self, name: str) -> None:
        """Notes that a worker's feed lost its connection, mostly because the worker died.

        Until a health probe, it computes prompts for other workers only if no other can: a request
        that names a dead worker cannot be saved by a retry. And it gets token ids only once a
        sample agrees again, since it may start anew with other files.
        """
        worker = self.records.get(name)
        if worker is not None:
            worker.proof.samples.restart()
            self.upstreams.doubt(worker.endpoint, is_doubted=True)

    def note_moved(self, worker: Worker, endpoint: str) -> None:
        """Notes that a worker has another address."""
        self._table.move(worker, endpoint)
        self._learning.ask_now(worker)
        self.engines.note_restart(worker)
        self.candidates.note_change()
        self._feeds.follow_soon()

    def _note_learned(self) -> None:
        """Follows feeds again: a worker's feed can be followed once its model is known."""
        self.candidates.note_change()
        for worker in self._table:
            self.engines.verifying.expect(worker)
        self._feeds.follow_soon()


def _loads(config: Config, table: Table, reporter: ClaimReporter | None) -> Loads:
    """Returns the loads of the workers' endpoints, whose changes are reported if anybody reads."""
    rate = config.policy.cost.prefill_tokens_per_second
    touched = None if reporter is None else reporter.touched
    return Loads(table.upstreams.loads, rate, touched, learns=config.policy.learn)
