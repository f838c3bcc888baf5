"""Offers: what workers could fetch of a prompt, from each other or from stores."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from extproc.routing.cost.fetch import Fetch, Peer

# Of more peers, only those that hold most are compared.
MAX_PEERS = 8


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


class Pullable(NamedTuple):
    """What workers could pull of a prompt.

    peers: the workers that hold it. pullers: the names of those that can pull. least: fewer tokens
    are not pulled.
    """

    peers: Sequence[Peer]
    pullers: Collection[str]
    least: int


NOTHING_PULLABLE = Pullable((), (), 1)


class Offers(msgspec.Struct, frozen=True, gc=False):
    """What workers could fetch of one prompt.

    prefill_tokens_per_second: as configured. pullable: from each other. stores: those that hold a
    part of it.
    """

    prefill_tokens_per_second: float
    pullable: Pullable = NOTHING_PULLABLE
    stores: Sequence[StoredPrefix] = ()


NOTHING = Fetch(0, 0.0)


def fetch_of(offers: Offers, worker: str, held: int, slowness: float) -> Fetch:
    """Returns the best that a worker can fetch; NOTHING if nothing is worth it.

    held: the tokens from the beginning that it holds, or will. slowness: of its prefills, relative
    to the configured speed.
    """
    best, pullable = NOTHING, offers.pullable
    if worker in pullable.pullers:
        speed = offers.prefill_tokens_per_second / slowness
        for peer in pullable.peers:
            more = peer.tokens - held
            if more < pullable.least or peer.name == worker:
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


def most_held(peers: Sequence[Peer]) -> Sequence[Peer]:
    """Returns the peers to compare: those that hold most, the idlest first."""
    return sorted(peers, key=lambda one: (-one.tokens, one.queued_tokens))[:MAX_PEERS]
