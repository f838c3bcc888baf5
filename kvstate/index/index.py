"""The block index: knows which ranks hold how many of the leading blocks of a prompt.

    index.py       names of workers and models, and look-ups over all ranks
    owner.py       one rank: applies its batches, counts, and keeps what has no key yet
    orphans.py     stored blocks whose parent is unknown
    turnover.py    when a hole does not matter any more
    core.py        the blocks themselves, in C (`kvstate/native/`), which knows numbers, no names

It knows tokens, the engines' hashes, tiers and groups; never a sequence number, a clock, a socket
or a request. What may be believed is decided by the feed, which has batches applied, blocks demoted
or forgotten, and the rank trusted or not.

The rule that holds it together: the key of a block is chained from all tokens before it, and from
what else its content depends on (adapter, salt, media). An engine's hash is only a name by which
later events of the same rank mean that block. So a prompt finds the blocks of every engine, and
there is no credit for a block whose beginning is not held. Credit is certain if the block was
stored since the rank's last hole, and while the rank is trusted.

One event loop owns it. What takes long is done in steps (`kvstate.steps`), and after each of them
look-ups find a whole index.
"""

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable

from msgspec.structs import replace

from kvstate.events import Event
from kvstate.index.core import LAYOUT, Core
from kvstate.index.owner import IndexLimits, Owner, Stored
from kvstate.media import MediaIds, StoreListener
from kvstate.overlap import Overlap, Prompt, Tier, encoded, of_any_rank
from kvstate.steps import finished


def saved_layout() -> str:
    """Returns whose saved rows the core can use: its name, layout and machine.

    Keys depend on the order of a machine's bytes.
    """
    return f"compiled {LAYOUT} {sys.byteorder}"


# Separates a worker's name from the serial number of a further rank, which the core treats as a
# separate worker; no address contains it.
_FURTHER = "\n"


class Index:
    """Blocks of all ranks of all workers.

    secret: 64 random bits, from which block keys are computed.
    """

    def __init__(self, secret: int, limits: IndexLimits | None = None) -> None:
        self._limits = limits = limits or IndexLimits()
        self.core = Core(secret, limits.blocks, Overlap)
        self._models: dict[str, int] = {}
        self._workers: list[str] = []  # by number; "" where a number is free
        self._holders: dict[int, str] = {}  # by owner
        self._further = 0  # how many of the holders are further ranks
        self._serials = itertools.count()
        self._free: list[int] = []  # numbers of workers
        self._owners: dict[str, list[Owner]] = {}  # by worker
        self._numbers: dict[str, int] = {}  # of workers
        self._stored = Stored(secret)
        self._stores: set[str] = set()  # names of those that are no workers

    @property
    def media_ids(self) -> MediaIds:
        """The ids that stand for media, for prompts that are looked up."""
        return self._stored.media_ids

    @property
    def is_heard(self) -> bool:
        """Whether a listener wants to know of all stores of some worker now."""
        listener = self._stored.listener
        return listener is not None and not listener.is_idle

    def listen(self, listener: StoreListener) -> None:
        """Passes all stores to a listener from now on."""
        self._stored.listener = listener

    def remember_removals(self, count: int) -> None:
        """Remembers so many last removals of each rank, at 16 bytes each; to be called once."""
        self.core.remember_removals(count)

    def note_time(self, seconds: float) -> None:
        """Tells the time of the removals that follow, by any clock."""
        self.core.note_time(seconds)

    def add(self, worker: str, rank: int, model: str, ranks: int = 1) -> Owner:
        """Adds a rank, which holds nothing and is not trusted yet.

        ranks: the number of the worker's ranks, which share its memory limits.
        """
        owners = self._owners.setdefault(worker, [])
        # a worker may be added again before its old ranks are removed
        holder = f"{worker}{_FURTHER}{next(self._serials)}" if owners else worker
        number = self.core.add_owner(self._worker(holder), self._model(model), rank)
        limits = self._limits.share(ranks)
        self.core.limit(number, limits.blocks)
        owner = Owner(self.core, number, worker, rank, model, limits, self._stored)
        self._holders[number] = holder
        self._further += holder != worker
        owners.append(owner)
        return owner

    def add_store(self, name: str, model: str) -> Owner:
        """Adds a store of one model's blocks, which no overlap of workers counts.

        name: of no worker, and no other store.
        """
        self._stores.add(name)
        return self.add(name, 0, model)

    def remove(self, owner: Owner) -> None:
        """Forgets a rank and frees all it had."""
        self.core.remove_owner(owner.number)
        self._stored.numbered.pop(owner, None)
        others = self._owners[owner.worker]
        others.remove(owner)
        if not others:
            del self._owners[owner.worker]
        holder = self._holders.pop(owner.number)
        self._further -= holder != owner.worker
        number = self._numbers.pop(holder)
        self._workers[number] = ""
        self._free.append(number)

    def clear(self, owner: Owner) -> None:
        """Runs the owner's `forgetting` without pauses."""
        finished(owner.forgetting())

    def demote(self, owner: Owner) -> None:
        """Runs the owner's `demoting` without pauses."""
        finished(owner.demoting())

    def apply(self, owner: Owner, events: Iterable[Event]) -> tuple[str, ...]:
        """Runs the owner's `applying_events` without pauses; returns the names of those skipped."""
        return finished(owner.applying_events(events))

    def overlaps(self, prompt: Prompt, *, names_ranks: bool = True) -> dict[str, Overlap]:
        """Returns the best rank's overlap of every worker that holds the prompt's first block.

        At most (tokens - 1) // block size blocks count: an engine always computes the last token.
        names_ranks: whether the request can name that rank. If not, the engine chooses any rank,
        and only blocks that all ranks hold are certain.
        """
        found = self._by_holder(prompt)
        if not self._further:  # one rank each, the usual case
            return found
        by_worker: defaultdict[str, list[Overlap]] = defaultdict(list)
        for holder, overlap in found.items():
            by_worker[holder.partition(_FURTHER)[0]].append(overlap)
        return {
            worker: self._of_ranks(worker, overlaps, names_ranks=names_ranks)
            for worker, overlaps in by_worker.items()
        }

    def overlap_of_rank(self, worker: str, rank: int, prompt: Prompt) -> Overlap | None:
        """Returns the overlap of one rank of a worker, None if it lacks the first block."""
        for holder, overlap in self._by_holder(prompt).items():
            if holder.partition(_FURTHER)[0] == worker and overlap.rank == rank:
                return overlap
        return None

    def tokens_on(self, prompt: Prompt, tier: Tier) -> dict[str, int]:
        """Returns how many first tokens of a prompt workers certainly hold on one tier, by name.

        Other copies on other tiers do not matter. Pages of bigrams, and models with several groups
        or drafts, are left out. Of a worker's ranks, the one that holds most counts.
        """
        model = self._models.get(prompt.model)
        if model is None:
            return {}
        first = encoded(prompt.namespace)
        found = self.core.overlaps_on(model, prompt.tokens, prompt.lora, first, self._workers, tier)
        most: dict[str, int] = {}
        for holder, overlap in found.items():
            worker = holder.partition(_FURTHER)[0]
            most[worker] = max(most.get(worker, 0), overlap.certain_tokens)
        stores = self._stores
        return {name: tokens for name, tokens in most.items() if tokens and name not in stores}

    def stored_tokens(self, prompt: Prompt) -> dict[str, int]:
        """Returns how many first tokens of a prompt stores hold, by name, as far as is known."""
        model = self._models.get(prompt.model)
        if model is None or not self._stores:
            return {}
        first = encoded(prompt.namespace)
        found = self.core.overlaps(model, prompt.tokens, prompt.lora, first, self._workers)
        return {
            name: overlap.certain_tokens + overlap.uncertain_tokens
            for name, overlap in found.items()
            if name in self._stores
        }

    def overlaps_by_number(self, prompt: Prompt) -> dict[str, Overlap]:
        """Returns possible overlaps for a prompt with an adapter that the events do not name.

        Which number is that adapter's is unknown, so the best overlap counts, as uncertain.
        """
        ranks = [owner for owner in self._stored.numbered if owner.model == prompt.model]
        best: dict[str, Overlap] = {}
        for number in set().union(*(self._stored.numbered[owner] for owner in ranks)):
            for worker, overlap in self.overlaps(replace(prompt, lora=number)).items():
                unsure = of_any_rank(overlap)
                if worker not in best or unsure.rank_order > best[worker].rank_order:
                    best[worker] = unsure
        return best

    def _of_ranks(self, worker: str, held: list[Overlap], *, names_ranks: bool) -> Overlap:
        """Returns a worker's overlap, from those of its ranks that hold the first block."""
        best = max(held, key=lambda one: one.rank_order)
        ranks = len(self._owners[worker])
        if names_ranks or ranks == 1:
            return best
        least = min(held, key=lambda one: one.certain_tokens)
        return of_any_rank(best, least if len(held) == ranks else None)

    def _by_holder(self, prompt: Prompt) -> dict[str, Overlap]:
        model = self._models.get(prompt.model)
        if model is None:
            return {}
        first = None if prompt.salt is None else encoded(prompt.namespace)
        found = self.core.overlaps(model, prompt.tokens, prompt.lora, first, self._workers)
        if prompt.model in self._stored.bigrams:
            for worker, overlap in self._bigram_overlaps(model, prompt).items():
                known = found.get(worker)
                if known is None or overlap.rank_order > known.rank_order:
                    found[worker] = overlap
        if self._stores:
            return {name: one for name, one in found.items() if name not in self._stores}
        return found

    def expire(self, owner: Owner, slots: int) -> bool:
        """Forgets blocks on doubted media that were not stored again since the last age began.

        slots: the most table slots to check. Returns whether all were checked.
        """
        return self.core.expire(owner.number, slots)

    def blocks_by_tier(self, worker: str) -> tuple[int, int, int, int]:
        """Returns how many block hashes a worker's ranks hold on each tier, certain or not."""
        counts = [0, 0, 0, 0]
        for owner in self._owners.get(worker, ()):
            for uncertain in (False, True):
                for tier, count in enumerate(self.core.tiers(owner.number, uncertain)):
                    counts[tier] += count
        return counts[0], counts[1], counts[2], counts[3]

    def memory(self) -> int:
        """Returns the memory of all blocks, in bytes."""
        return self.core.memory()

    def check(self) -> None:
        """Raises AssertionError if an invariant of the core is violated; slow."""
        self.core.check()

    def _worker(self, name: str) -> int:
        if not self._free:
            self._free.append(len(self._workers))
            self._workers.append("")
        number = self._numbers[name] = self._free.pop()
        self._workers[number] = name
        return number

    def _model(self, name: str) -> int:
        if name not in self._models:
            self._models[name] = self.core.add_model(name.encode())
        return self._models[name]

    def _bigram_overlaps(self, model: int, prompt: Prompt) -> dict[str, Overlap]:
        """Returns overlaps of bigram pages: N tokens make N - 1, of which N - 2 can be reused."""
        if not prompt.tokens:
            return {}
        first = encoded((prompt.tokens[0], *prompt.namespace))
        seconds = memoryview(prompt.tokens)[1:]
        return self.core.overlaps(model, seconds, prompt.lora, first, self._workers)
