"""Pulling, priced: which workers could pull a prompt from others, and what is under way.

Engines hand over blocks from host memory. An overlap counts each block on its nearest tier, so what
lies in host memory is looked up apart, and only if some worker holds enough more than another.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from extproc.config.schema import Config
from extproc.features.fetching.offers import NOTHING_PULLABLE, Pullable, most_held
from extproc.features.fetching.term import work_of
from extproc.requests.request import RoutingRequest
from extproc.routing.candidates.eligibility import Candidate, why_excluded
from extproc.routing.cost.fetch import Peer
from extproc.routing.decision import Decision, PullSource
from extproc.routing.inputs.query import Query, demand_of
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Loads
from extproc.routing.load.transfers import FleetTransfers, Transfers, counted_seconds
from kvstate.overlap import Prompt

# A pull is measured only if the worker's queue is no longer than this before it.
IDLE_TOKENS = 512

# The prefills of a worker that pulls are not measured for this multiple of the expected time.
UNSEEN_SLACK = 1.5


class Pull(NamedTuple):
    """A pull under way. Times are those of `Pulling`.

    source: the transfers of the worker that sends, fleet: those of all. tokens: its own and those
    that it waits for. seconds: as it is expected to take. configured: tokens per second.
    """

    source: Transfers
    fleet: FleetTransfers
    tokens: float
    seconds: float
    began_at: float
    configured: float

    def expect(self) -> None:
        """Notes that its arrival will be noted."""
        self.fleet.expect(self.seconds, self.began_at)

    def note_arrival(self, late_seconds: float, now: float) -> None:
        """Notes that the worker has what it pulled. late_seconds: how late that is known."""
        seconds = max(0.0, now - self.began_at - late_seconds)
        counted = counted_seconds(self.tokens, seconds, self.configured)
        if counted is not None:
            self.source.measure(self.tokens, counted, now)
            self.fleet.measure(self.tokens, counted, now)


class Pulling:
    """The pulls of one router's requests. Times are seconds of one monotonic clock.

    on_host: returns how many first tokens of a prompt each worker has in host memory, by name.
    """

    def __init__(
        self, config: Config, loads: Loads, on_host: Callable[[Prompt], Mapping[str, int]]
    ) -> None:
        rules = config.disaggregation
        self._least = rules.min_pulled_tokens or 1
        self._configured = float(rules.transfer_tokens_per_second)
        self._loads = loads
        self._on_host = on_host

    def offers(
        self, request: RoutingRequest, query: Query, snapshot: Snapshot, now: float
    ) -> Pullable:
        """Returns what workers could pull of a query's only prompt."""
        prompt = query.sole
        if prompt is None or not (snapshot.may_split and query.reads_cache):
            return NOTHING_PULLABLE
        if not self._loads.fleet_transfers.may_begin(now):
            return NOTHING_PULLABLE
        certain = {name: one.certain_tokens for name, one in snapshot.overlaps[0].items()}
        if max(certain.values(), default=0) < self._least:
            return NOTHING_PULLABLE
        others = {name for one in query.variants for name in one.workers}
        able = [
            worker
            for worker in snapshot.workers
            if worker.transfer_port is not None and worker.name not in others
        ]
        held, demand = self._on_host(prompt), demand_of(request, query)
        peers = [
            self._peer(worker, min(held[worker.name], certain.get(worker.name, 0)), snapshot, now)
            for worker in able
            if worker.name in held
            and worker.endpoint not in snapshot.ejected
            and not why_excluded(worker, demand, snapshot.unfit)
        ]
        peers = [one for one in peers if one.tokens >= self._least]
        pullers = frozenset([worker.name for worker in able])
        return Pullable(most_held(peers), pullers, self._least)

    def _peer(self, worker: Candidate, tokens: int, snapshot: Snapshot, now: float) -> Peer:
        transfers, assumed = self._loads.transfers(worker.endpoint), self._assumed(now)
        return Peer(
            worker.name,
            worker.endpoint,
            worker.transfer_port or 0,
            tokens,
            transfers.queued_tokens(assumed, now),
            transfers.speed(assumed, now),
            work_of(snapshot.load(worker.endpoint, now), snapshot.rules.cost.running_tokens),
        )

    def begin_pull(self, decision: Decision, endpoint: str, now: float) -> Pull | None:
        """Notes the pull of a request that is about to be booked on an endpoint.

        Returns it if it can be measured: if there is one, and its worker has hardly any queue.
        """
        if decision.source is None:
            return None
        queue = self._loads.load(endpoint, now).backlog_tokens
        pull = self.begin(decision.source, endpoint, now)
        return None if queue > IDLE_TOKENS else pull

    def begin(self, source: PullSource, endpoint: str, now: float) -> Pull:
        """Notes that the worker at an endpoint pulls from another one; returns the pull.

        Meanwhile its prefills are not measured: all requests with the same prompt wait for it.
        """
        transfers, assumed = self._loads.transfers(source.endpoint), self._assumed(now)
        tokens = transfers.begin(source.tokens, assumed, now)
        seconds = tokens / transfers.speed(assumed, now)
        self._loads.note_unseen(endpoint, UNSEEN_SLACK * seconds, now)
        fleet = self._loads.fleet_transfers
        return Pull(transfers, fleet, tokens, seconds, now, self._configured)

    def _assumed(self, now: float) -> float:
        return self._loads.fleet_transfers.speed(self._configured, now)


def with_priced_source(decision: Decision) -> Decision:
    """Adds the worker from which the pick should pull, if its price was a reason to pick it.

    A retry does not go to the source: no worker can pull from itself.
    """
    fetch = decision.basis.fetches.get(decision.worker)
    if fetch is None or fetch.peer is None or decision.prefill is not None:
        return decision
    peer = fetch.peer
    return msgspec.structs.replace(
        decision,
        source=PullSource(peer.endpoint, peer.port, fetch.tokens),
        pick=tuple([endpoint for endpoint in decision.pick if endpoint != peer.endpoint]),
        uncached_tokens=max(0.0, decision.uncached_tokens - fetch.tokens),
    )
