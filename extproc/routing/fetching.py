"""Fetching: what a worker can get of a prompt's KV blocks without computing them.

It can pull them from another worker, its peer, or load them from a store that it mounts. Both count
only for what it does not hold itself, and for less than what it holds:

    a pull = tokens - (tokens + tokens that others still pull from there)
                      x prefill speed of the worker / transfer speed of the peer
    a load = tokens x worth of the store x share of such tokens that the worker loaded lately

in tokens that need not be computed, never below 0. The better of the two counts, with the weight
that an uncached token has on an idle fleet: on a busy one these tokens would delay others, but a
further copy of blocks takes the place of others. Both count only by the share by which the worker
has less to do than all that hold as much: elsewhere, the copy would relieve nobody.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import msgspec

from extproc._core import LoadColumns
from extproc.config.schema import Cost
from extproc.routing.eligibility import Candidate
from extproc.routing.load import Load

# Of more peers, only those that hold most are compared.
MAX_PEERS = 8


class Peer(NamedTuple):
    """A worker from which others may pull a prompt.

    name, endpoint, port: the worker's, and the port on which it hands over. tokens: of the prompt,
    from its beginning. queued_tokens: those under way to others. tokens_per_second: of transfers.
    work: what is in flight there, in tokens.
    """

    name: str
    endpoint: str
    port: int
    tokens: int
    queued_tokens: float
    tokens_per_second: float
    work: float = 0.0


class StoredPrefix(NamedTuple):
    """What a store holds of a prompt.

    tokens: from its beginning. worth: of such a token, as a share of one that need not be loaded.
    workers: the names of those that mount it. shares: of the tokens offered to them, what those
    loaded that did not load all (`extproc.routing.store_share`).
    """

    store: str
    tokens: int
    worth: float
    workers: Collection[str]
    shares: Mapping[str, float] = {}


class Offers(msgspec.Struct, frozen=True, gc=False):
    """What workers could fetch of one prompt.

    peers: the workers that hold it. pullers: the names of those that can pull. least: fewer tokens
    are not pulled. prefill_tokens_per_second: as configured. stores: those that hold a part of it.
    """

    prefill_tokens_per_second: float
    peers: Sequence[Peer] = ()
    pullers: Collection[str] = ()
    least: int = 1
    stores: Sequence[StoredPrefix] = ()


class Fetch(NamedTuple):
    """What one worker can fetch beyond what it holds.

    value: the tokens that need not be computed then. peer: from which it pulls, None if it loads.
    store: from which it loads, "" if it pulls. credit: by how much its cost is lower. share: of the
    store's tokens, what it is expected to load. held: the tokens that it holds itself.
    """

    tokens: int
    value: float
    peer: Peer | None = None
    store: str = ""
    credit: float = 0.0
    share: float = 1.0
    held: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns what POST /explain shows."""
        shown = {"tokens": self.tokens, "value": round(self.value)}
        if self.peer is not None:
            return {**shown, "from": self.peer.endpoint}
        return {**shown, "from": self.store, "share": round(self.share, 3)}


NOTHING = Fetch(0, 0.0)


def fetch_of(offers: Offers, worker: str, held: int, slowness: float) -> Fetch:
    """Returns the best that a worker can fetch; NOTHING if nothing is worth it.

    held: the tokens from the beginning that it holds, or will. slowness: of its prefills, relative
    to the configured speed.
    """
    best = NOTHING
    if worker in offers.pullers:
        speed = offers.prefill_tokens_per_second / slowness
        for peer in offers.peers:
            more = peer.tokens - held
            if more < offers.least or peer.name == worker:
                continue
            value = more - (more + peer.queued_tokens) * speed / peer.tokens_per_second
            if value > best.value:
                best = Fetch(more, value, peer)
    for stored in offers.stores:
        more = stored.tokens - held
        if more * stored.worth > best.value and worker in stored.workers:
            share = stored.shares.get(worker, 1.0)
            value = more * stored.worth * share
            if value > best.value:
                best = Fetch(more, value, None, stored.store, share=share, held=held)
    return best


def lower_costs(
    costs: list[float],
    workers: Sequence[Candidate],
    loads: LoadColumns,
    cost: Cost,
    offers: Offers,
    held: Callable[[str], int],
) -> dict[str, Fetch]:
    """Lowers the costs of workers that can fetch; returns what each can, by name.

    cost: the weights. held: returns how many tokens from the beginning a worker holds, or will, by
    its name.
    """
    found: dict[str, Fetch] = {}
    weight = cost.affinity_percent / 100
    rows = [(worker.name, loads[at], held(worker.name)) for at, worker in enumerate(workers)]
    works = [work_of(load, cost.running_tokens) for _, load, _ in rows]
    least: dict[int, float] = {}  # work of a worker that holds so many tokens
    for at, (name, load, tokens) in enumerate(rows):
        fetch = fetch_of(offers, name, tokens, load.slowness)
        if fetch.value <= 0.0:
            continue
        if fetch.peer is not None:
            share = relief(offers.peers, fetch.peer.tokens, works[at])
        else:
            whole = tokens + fetch.tokens
            if whole not in least:
                holders = zip(rows, works, strict=True)
                least[whole] = min([work for row, work in holders if row[2] >= whole], default=inf)
            share = share_of_relief(least[whole], works[at])
        if share > 0.0:
            credit = weight * fetch.value * share * load.slowness
            found[name] = fetch._replace(credit=credit)
            costs[at] -= credit
    return found


def work_of(load: Load, running: float) -> float:
    """Returns what is in flight on a worker, in tokens; running: of each request."""
    return load.backlog_tokens + running * (load.in_flight + load.others)


def relief(peers: Sequence[Peer], tokens: int, work: float) -> float:
    """Returns by which share a worker has less work than all peers that hold so many tokens.

    work: the worker's own.
    """
    return share_of_relief(min(one.work for one in peers if one.tokens >= tokens), work)


def share_of_relief(least: float, work: float) -> float:
    """Returns by which share work is less than the least of others; all of it if there are none.

    least: of those, infinite if there are none.
    """
    return max(0.0, 1.0 - work / least) if least > 0.0 else 0.0


def most_held(peers: Sequence[Peer]) -> Sequence[Peer]:
    """Returns the peers to compare: those that hold most, the idlest first."""
    return sorted(peers, key=lambda one: (-one.tokens, one.queued_tokens))[:MAX_PEERS]
