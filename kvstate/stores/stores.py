"""Stores that workers share: whose blocks count for each worker that mounts them.

A worker's events name what it put into a store, by their locality
(`kvstate.wire.zmq_wire.decoding_shared`) or by their medium (`kvstate.index.shared_media`); or the
store publishes events of its own (`pools.py`). These blocks are the store's: a removal by any
publisher removes them for all. Most stores tell of no removals, such as files that somebody else
deletes; so blocks are forgotten some time after they were last stored, and none of them is ever
certain.

A restarted router begins with what was saved of a store, but credits nothing of it until each
worker that may have changed it is proven to be the same, and what it sent meanwhile is applied.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.index.store_gate import StoreGate
from kvstate.overlap import Prompt
from kvstate.rows.format import SavedStore, SavedStoreRows
from kvstate.steps import Steps
from kvstate.stores.pools import Pool


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


def _configured(rules: StoreRules) -> tuple[tuple[str, ...] | None, tuple[str, ...], float]:
    """Returns what is compared of a store's configuration: workers, media, and its age."""
    workers = None if rules.workers is None else tuple(sorted(rules.workers))
    return workers, tuple(sorted(rules.media)), rules.max_age_seconds


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
    """The stores of a fleet, whose blocks the index holds as well."""

    def __init__(self, index: Index, rules: Sequence[StoreRules]) -> None:
        self._index = index
        self._rules = rules
        self._gates = defaultdict[str, StoreGate](StoreGate)  # by store
        self._owners: dict[tuple[str, str], Owner] = {}  # by store and model
        self._ranks: dict[str, list[Owner]] = {}  # of workers, by name
        self._swept_at: dict[tuple[str, str], float] = {}  # when their ages began
        self._pooled: set[str] = set()  # names of those that publish events of their own
        self._unproven: dict[tuple[str, str], set[str]] = {}  # workers that have not proven them
        self._lost: set[tuple[str, str]] = set()  # cannot be proven any more

    def attach(self, worker: str, rank: Owner) -> None:
        """Has a rank's shared blocks belong to the store that its worker mounts, if any."""
        for rules in self._rules:
            if rules.workers is None or worker in rules.workers:
                rank.store = self._owner(rules.name, rank.model)
                rank.gate = self.gate(rules.name)
                rank.store_media = rules.media
                self._ranks.setdefault(worker, []).append(rank)
                return

    def detach(self, worker: str) -> None:
        """Forgets a worker; what it stored stays."""
        self._ranks.pop(worker, None)

    def pool(self, store: str) -> Pool:
        """Returns the sink of the events that a store publishes itself."""
        self._pooled.add(store)
        return Pool(self._index.core, lambda: self._lenders(store), self.gate(store))

    def gate(self, store: str) -> StoreGate:
        """Returns what is passed by whatever changes or copies a store, of whichever model."""
        return self._gates[store]

    def is_pooled(self, store: str) -> bool:
        """Returns whether a store publishes events of its own."""
        return store in self._pooled

    def owner(self, store: str, model: str) -> Owner | None:
        """Returns the owner of a store's blocks of a model, None if there is no such store."""
        is_known = any(rules.name == store for rules in self._rules)
        return self._owner(store, model) if is_known else None

    def of_workers(self, workers: Collection[str]) -> list[SharedBlocks]:
        """Returns the blocks of the stores that some workers mount, of their models."""
        owners = {rank.store for worker in workers for rank in self._ranks.get(worker, ())}
        return [
            SharedBlocks(*place, owner)
            for place, owner in self._owners.items()
            if owner in owners and place not in self._unproven
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
        self._unproven.clear()
        self._lost.clear()

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
            if tokens and (rules.name, prompt.model) not in self._unproven:
                yield StoredTokens(rules.name, tokens, self._workers(rules))

    def blocks(self) -> Iterator[tuple[str, int]]:
        """Yields the name of each store, and how many blocks it is known to have."""
        for rules in self._rules:
            owners = [owner for (name, _), owner in self._owners.items() if name == rules.name]
            yield rules.name, sum([owner.blocks for owner in owners])

    def due(self, now: float) -> Iterator[SharedBlocks]:
        """Yields the stores of which blocks are old enough to be forgotten; now: in seconds."""
        for rules in self._rules:
            for place, owner in self._owners.items():
                if place[0] != rules.name:
                    continue
                if now - self._swept_at.setdefault(place, now) >= rules.max_age_seconds:
                    self._swept_at[place] += rules.max_age_seconds
                    yield SharedBlocks(*place, owner)

    def saving(self, now: float) -> Iterator[Steps[SavedStoreRows]]:
        """Yields what saves each store that can be proven later, in steps.

        Not those that publish events of their own: what they removed meanwhile stays unknown.
        """
        for rules in self._rules:
            for (name, model), owner in list(self._owners.items()):
                is_unknown = (name, model) in self._unproven
                if name == rules.name and name not in self._pooled and not is_unknown:
                    yield self.gate(name).passing(self._saving(rules, model, owner, now))

    def _saving(
        self, rules: StoreRules, model: str, owner: Owner, now: float
    ) -> Steps[SavedStoreRows]:
        rows: list[bytes] = []
        saved = yield from owner.saving(rows)
        ranks = self._ranks.items()
        publishers = {name for name, each in ranks if any(one.store is owner for one in each)}
        head = SavedStore(
            rules.name,
            model,
            *_configured(rules),
            tuple(sorted(publishers | (rules.workers or set()))),
            self._swept_at.get((rules.name, model), now),
            saved,
        )
        return SavedStoreRows(head, rows)

    def why_refused(self, saved: SavedStore, now: float) -> str:
        """Returns why what was saved of a store is of no use here, "" if it is."""
        rules = next((one for one in self._rules if one.name == saved.store), None)
        if rules is None:
            return "it is not configured any more"
        if (saved.workers, saved.media, saved.max_age_seconds) != _configured(rules):
            return "it is configured differently now"
        if not 0.0 <= now - saved.swept_at < 2 * rules.max_age_seconds:
            return "it is too old, or of another time"
        return ""

    def restoring(self, saved: SavedStoreRows) -> Steps[bool]:
        """Takes what was saved of a store, in steps, before any worker is followed.

        Returns whether it could. Nothing of it counts before all its publishers are proven.
        """
        head = saved.store
        place, owner = (head.store, head.model), self._owner(head.store, head.model)
        self._unproven[place] = set(head.publishers)
        self._swept_at[place] = head.swept_at
        restoring = owner.restoring(head.owner, saved.rows)
        is_whole = yield from self.gate(head.store).passing(restoring)
        if not is_whole:
            del self._unproven[place]
        return is_whole

    def note_proven(self, worker: str) -> None:
        """Notes that a worker is the one that changed stores before a restart."""
        for place, workers in list(self._unproven.items()):
            workers.discard(worker)
            if not workers and place not in self._lost:
                del self._unproven[place]

    def believe(self, store: str, model: str) -> None:
        """Notes that a store has what it is now known to have, whatever was saved of it."""
        self._unproven.pop((store, model), None)
        self._lost.discard((store, model))

    def note_lost(self, worker: str | None = None) -> None:
        """Notes that a worker is another one now, or that all that are awaited do not come."""
        for place, workers in self._unproven.items():
            if worker is None or worker in workers:
                self._lost.add(place)

    def forgetting(self) -> Steps[None]:
        """Forgets, in steps, the stores that cannot be proven any more."""
        while self._lost:
            place = next(iter(self._lost))
            yield from self.gate(place[0]).passing(self._owners[place].forgetting())
            self._lost.discard(place)
            self._unproven.pop(place, None)

    def _owner(self, store: str, model: str) -> Owner:
        place = store, model
        if place not in self._owners:
            owner = self._owners[place] = self._index.add_store(_holder(store, model), model)
            owner.trusted = True
        return self._owners[place]
