"""Pulling, priced: which workers could pull a prompt from others, and what is under way.

Engines hand over blocks from host memory. An overlap counts each block on its nearest tier, so what
lies in host memory is looked up apart, and only if some worker holds enough more than another.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from extproc.config.schema import Config
from extproc.routing.decision import Decision, PullSource
from extproc.routing.eligibility import Candidate, why_excluded
from extproc.routing.fetching import Offers, Peer, most_held, work_of
from extproc.routing.load import Loads
from extproc.routing.query import Query, Snapshot
from kvstate.overlap import Prompt

# A pull is measured only if the worker's queue is no longer than this before it.
IDLE_TOKENS = 512

# The prefills of a worker that pulls are not measured for this multiple of the expected time.
UNSEEN_SLACK = 1.5

NO_TOKENS: Mapping[str, int] = {}


def nothing_on_host(_: Prompt) -> Mapping[str, int]:
    """Returns that no worker holds anything in host memory."""
    return NO_TOKENS


class Pull(NamedTuple):
    """A pull under way.

    source: the endpoint of the worker that sends. tokens: its own and those that it waits for.
    """

    source: str
    tokens: float
    began_at: float


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
        self._prefill = float(config.policy.cost.prefill_tokens_per_second)
        self._loads = loads
        self._on_host = on_host

    def offer(self, query: Query, snapshot: Snapshot, now: float) -> Snapshot:
        """Returns the snapshot with what workers could pull of a query's only prompt."""
        prompt = query.sole
        if prompt is None or not (query.may_split and query.reads_cache):
            return snapshot
        certain = {name: one.certain_tokens for name, one in snapshot.overlaps[0].items()}
        if max(certain.values(), default=0) < self._least:
            return snapshot
        others = {name for one in query.variants for name in one.workers}
        able = [
            worker
            for worker in snapshot.workers
            if worker.transfer_port is not None and worker.name not in others
        ]
        held = self._on_host(prompt)
        peers = [
            self._peer(worker, min(held[worker.name], certain.get(worker.name, 0)), snapshot, now)
            for worker in able
            if worker.name in held
            and worker.endpoint not in snapshot.ejected
            and not why_excluded(worker, query.demand, snapshot.unfit)
        ]
        peers = [one for one in peers if one.tokens >= self._least]
        if not peers:
            return snapshot
        before = snapshot.offers or Offers(self._prefill)
        offers = msgspec.structs.replace(
            before,
            peers=most_held(peers),
            pullers=frozenset([worker.name for worker in able]),
            least=self._least,
        )
        return msgspec.structs.replace(snapshot, offers=offers)

    def _peer(self, worker: Candidate, tokens: int, snapshot: Snapshot, now: float) -> Peer:
        transfers = self._loads.transfers(worker.endpoint)
        return Peer(
            worker.name,
            worker.endpoint,
            worker.transfer_port or 0,
            tokens,
            transfers.queued_tokens(self._configured, now),
            transfers.speed(self._configured, now),
            work_of(snapshot.load(worker.endpoint, now), snapshot.rules.cost.running_tokens),
        )

    def begin(self, source: PullSource, endpoint: str, now: float) -> Pull:
        """Notes that the worker at an endpoint pulls from another one; returns the pull.

        Meanwhile its prefills are not measured: all requests with the same prompt wait for it.
        """
        transfers = self._loads.transfers(source.endpoint)
        tokens = transfers.begin(source.tokens, self._configured, now)
        seconds = tokens / transfers.speed(self._configured, now)
        self._loads.note_unseen(endpoint, UNSEEN_SLACK * seconds, now)
        return Pull(source.endpoint, tokens, now)

    def note_arrival(self, pull: Pull, late_seconds: float, now: float) -> None:
        """Notes that the worker has what it pulled. late_seconds: how late that is known."""
        seconds = max(0.0, now - pull.began_at - late_seconds)
        self._loads.transfers(pull.source).measure(pull.tokens, seconds, self._configured, now)


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
