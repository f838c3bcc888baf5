"""Stores that workers share: whose blocks count for each worker that mounts them.

A worker's events name what it put into a store, by their locality
(`kvstate.wire.zmq_wire.shared_events`) or by their medium (`kvstate.shared_media`); or the store
publishes events of its own (`kvstate.pools`). These blocks are the store's: a removal by any
publisher removes them for all. Most stores tell of no removals, such as files that somebody else
deletes; so blocks are forgotten some time after they were last stored, and none of them is ever
certain.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from kvstate.index import Index
from kvstate.overlap import Prompt
from kvstate.owner import Owner
from kvstate.pools import Pool
from kvstate.store_gate import StoreGate


def _holder(store: str, model: str) -> str:
    """Returns the name of a store's blocks of one model in the index, which no worker has."""
    return f"store {store} of {model}"


class StoreRules(NamedTuple):
    """A store.

    workers: the names of those that mount it; None for those whose events name it. max_age_seconds:
    blocks count at least this long after they were last stored, and until the next sweep. media:
    those of their events, in capitals, that lie in the store though no locality says so.
    """

    name: str
    workers: frozenset[str] | None = None
    max_age_seconds: float = 3_600.0
    media: frozenset[str] = frozenset()


class StoredTokens(NamedTuple):
    """How many first tokens of a prompt a store has, and the workers that mount it."""

    store: str
    tokens: int
    workers: Collection[str]


class SharedBlocks(NamedTuple):
    """A store's blocks of one model."""

    store: str
    model: str
    owner: Owner


class Stores:
    """The stores of a fleet.

    index: also holds their blocks. gate: passed by whatever changes or copies them.
    """

    def __init__(self, index: Index, rules: Sequence[StoreRules]) -> None:
        self._index = index
        self._rules = rules
        self.gate = StoreGate()
        self._owners: dict[tuple[str, str], Owner] = {}  # by store and model
        self._ranks: dict[str, list[Owner]] = {}  # of workers, by name
        self._swept_at: dict[tuple[str, str], float] = {}

    def attach(self, worker: str, rank: Owner) -> None:
        """Has a rank's shared blocks belong to the store that its worker mounts, if any."""
        for rules in self._rules:
            if rules.workers is None or worker in rules.workers:
                rank.store = self._owner(rules.name, rank.model)
                rank.store_media = rules.media
                self._ranks.setdefault(worker, []).append(rank)
                return

    def detach(self, worker: str) -> None:
        """Forgets a worker; what it stored stays."""
        self._ranks.pop(worker, None)

    def pool(self, store: str) -> Pool:
        """Returns the sink of the events that a store publishes itself."""
        return Pool(self._index.core, lambda: self._lenders(store), self.gate)

    def owner(self, store: str, model: str) -> Owner | None:
        """Returns the owner of a store's blocks of a model, None if there is no such store."""
        is_known = any(rules.name == store for rules in self._rules)
        return self._owner(store, model) if is_known else None

    def of_workers(self, workers: Collection[str]) -> list[SharedBlocks]:
        """Returns the blocks of the stores that some workers mount, of their models."""
        owners = {rank.store for worker in workers for rank in self._ranks.get(worker, ())}
        return [
            SharedBlocks(*place, owner) for place, owner in self._owners.items() if owner in owners
        ]

    def _lenders(self, store: str) -> Iterator[tuple[Owner, list[Owner]]]:
        """Yields, for each model, the owner of a store's blocks and the ranks that mount it."""
        ranks = list(chain.from_iterable(self._ranks.values()))
        for (name, _), owner in self._owners.items():
            if name == store:
                yield owner, [rank for rank in ranks if rank.store is owner]

    def close(self) -> None:
        """Forgets all blocks."""
        for owner in self._owners.values():
            self._index.remove(owner)
        self._owners.clear()

    def mounted_by(self, worker: str) -> str | None:
        """Returns the store that a worker mounts; None if that is not known."""
        return next((one.name for one in self._rules if worker in self._workers(one)), None)

    def _workers(self, rules: StoreRules) -> Collection[str]:
        if rules.workers is not None:
            return rules.workers
        ranks = self._ranks.items()
        return {name for name, each in ranks if any(one.shares for one in each)}

    def stored(self, prompt: Prompt) -> Iterator[StoredTokens]:
        """Yields what each store has of a prompt, and who mounts it."""
        found = self._index.stored_tokens(prompt)
        for rules in self._rules:
            tokens = found.get(_holder(rules.name, prompt.model), 0)
            if tokens:
                yield StoredTokens(rules.name, tokens, self._workers(rules))

    def blocks(self) -> Iterator[tuple[str, int]]:
        """Yields the name of each store, and how many blocks it is known to have."""
        for rules in self._rules:
            owners = [owner for (name, _), owner in self._owners.items() if name == rules.name]
            yield rules.name, sum([owner.blocks for owner in owners])

    def due(self, now: float) -> Iterator[Owner]:
        """Yields the stores of which blocks are old enough to be forgotten; now: in seconds."""
        for rules in self._rules:
            for place, owner in self._owners.items():
                if place[0] != rules.name:
                    continue
                if now - self._swept_at.setdefault(place, now) >= rules.max_age_seconds:
                    self._swept_at[place] = now
                    yield owner

    def _owner(self, store: str, model: str) -> Owner:
        place = store, model
        if place not in self._owners:
            owner = self._owners[place] = self._index.add_store(_holder(store, model), model)
            owner.trusted = True
            owner.gate = self.gate
        return self._owners[place]
