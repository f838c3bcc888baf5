"""One rank of the index: applies the batches of its feed, and counts what it holds.

It never sees a sequence number: the feed (`kvstate.feeds.feed`) decides what is applied, when all
is forgotten or uncertain, and whether the rank is trusted. `index.py` has the rule for keys.

Batches that the core cannot apply in one call fall back to typed events, which are applied one by
one and whose decoder names faults. A block whose parent is unknown has no key: it waits as an
orphan and earns no credit until the parent arrives.

A rank's blocks are bounded: a store beyond the limit is rejected, so that the existing credit stays
correct.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import msgspec

from kvstate.events import (
    ALL_TAKEN,
    BatchResult,
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Body,
    Event,
    OtherGroupStored,
)
from kvstate.index.core import (
    CERTAIN,
    MAY_REPEAT,
    OTHER_KIND,
    UNCERTAIN,
    WATCHES,
    WORK,
    Core,
    Outcome,
    OwnerStatus,
    StoreResult,
)
from kvstate.index.orphans import Orphan, Orphanage, orphans_of
from kvstate.index.shared_media import names_media, parted, without_copies
from kvstate.index.store_gate import StoreGate
from kvstate.index.turnover import Turnover
from kvstate.media import MediaIds, StoreListener, has_media
from kvstate.overlap import Prompt, Tier, Tokens, encoded, tier_of
from kvstate.reuse import NO_RULES, OtherGroups, ReuseRules
from kvstate.rows.format import SavedOwner
from kvstate.seldom import is_logged
from kvstate.steps import Steps
from kvstate.wire.extras import (
    ADMISSION_FAULTS,
    DOUBTFUL_GROUP,
    OTHER_LOCALITY,
    Admission,
    missed_of,
)
from kvstate.wire.zmq_wire import decoding, decoding_shared

log = logging.getLogger("kvsteer.feed")

# The most memory that a block uses in the core, including partly filled tables.
BYTES_PER_BLOCK = 64

# The least memory for each rank, however many ranks the worker is configured with.
MIN_BYTES_OF_RANK = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Memory limits of one worker, against a faulty publisher."""

    bytes: int = 256 * 1024 * 1024
    orphans: int = 65_536
    orphan_bytes: int = 32 * 1024 * 1024

    @property
    def blocks(self) -> int:
        """The most blocks of the worker."""
        return self.bytes // BYTES_PER_BLOCK

    def share(self, ranks: int) -> "IndexLimits":
        """Returns the share of each of the worker's ranks."""
        least = min(self.bytes, MIN_BYTES_OF_RANK)
        return IndexLimits(
            max(self.bytes // ranks, least), self.orphans // ranks, self.orphan_bytes // ranks
        )


# The largest piece of a store that is applied at once; it has at least one block, however large.
PIECE_TOKENS = 16_384
PIECE_BLOCKS = 1_024

# The most blocks copied at once.
_COPIES = 32


# The most adapters that one rank may name by number alone: each costs one more lookup for requests
# with an adapter.
MAX_NUMBERED_ADAPTERS = 16


class Stored:
    """What ranks have stored that needs more than its place in the core.

    media_ids: stand for media in the ids of tokens. listener: takes all stores; None if there is
    none.
    bigrams: the models for which a rank stored pages of bigrams. numbered: for each rank, the
    numbers of adapters for which it stored blocks without naming them.
    """

    def __init__(self, secret: int) -> None:
        self.media_ids = MediaIds(secret)
        self.listener: StoreListener | None = None
        self.bigrams: set[str] = set()
        self.numbered: dict[Owner, set[int]] = {}

    def note(self, owner: "Owner", event: BlocksStored) -> None:
        """Notes the kinds of a store's blocks."""
        if event.bigrams:
            self.bigrams.add(owner.model)
        if isinstance(event.lora, int):
            numbers = self.numbered.setdefault(owner, set())
            if len(numbers) < MAX_NUMBERED_ADAPTERS:
                numbers.add(event.lora)


# How many prompts of a rank can be watched at once, and in how many ways each may be stored.
WATCHED_PROMPTS = 8
_WAYS = WATCHES // WATCHED_PROMPTS

_NO_TOKENS = Tokens("I")

# The work of one step that saves or restores rows, in table slots: some 0.05 ms.
ROWS_WORK = 4_096

# The outcome of a message that the core cannot read: how many events it has is not known.
NOTHING_APPLIED: Outcome = (0, -1, False, ())


class Owner:
    """A rank: its identity, counters and orphans; the core has its blocks.

    A sink of its feed (`kvstate.feeds.effects`). Long operations are iterators of short steps;
    if they are stopped early, the rest stays undone.

    stored: shared by the index. block_size: tokens per block in its last store, read at every pick.
    store: the owner of the blocks that it puts into a store, which it shares with others; None if
    they count for nobody. store_media: the media of its events, in capitals, that lie in the store
    although the events do not say so. shares: whether it published any of them. gate: is passed by
    whatever changes the store; None without one.
    """

    def __init__(
        self,
        core: Core,
        number: int,
        worker: str,
        rank: int,
        model: str,
        limits: IndexLimits,
        stored: Stored,
    ) -> None:
        self.limits = limits
        self.number = number
        self.worker = worker
        self.rank = rank
        self.model = model
        self.orphans = Orphanage()
        self.block_size: int | None = None
        self.store: Owner | None = None
        self.store_media: frozenset[str] = frozenset()
        self.shares = False
        self.gate: StoreGate | None = None
        self._core = core
        self._stored = stored
        self._trusted = False
        self._over_limit = 0  # the core's count, when last read
        self._block_sizes = 0  # how often a block size was learned
        self._may_be_uncertain = False  # whether any of its blocks may be uncertain
        self._turnover = Turnover()
        self._rules = NO_RULES
        self._counts: Counter[str] = Counter()
        self._names_salts: bool | None = None
        self._names_loras: bool | None = None

    @property
    def trusted(self) -> bool:
        """Whether its certain blocks count as certain now."""
        return self._trusted

    @trusted.setter
    def trusted(self, trusted: bool) -> None:
        if trusted != self._trusted:
            self._trusted = trusted
            self._core.trust(self.number, trusted)

    @property
    def status(self) -> OwnerStatus:
        """Counts of its blocks."""
        return self._core.status(self.number)

    @property
    def blocks(self) -> int:
        """Block hashes held, over all media."""
        return self.status["blocks"]

    @property
    def has_removed(self) -> bool:
        """Whether it has ever announced the removal of a certain block, or of an unknown one."""
        return self.status["removed_certain"] > 0 or self.counts["removed_unknown"] > 0

    @property
    def uncertain_blocks(self) -> int:
        """Blocks stored before a hole."""
        return sum(self._core.tiers(self.number, UNCERTAIN))

    @property
    def doubted_blocks(self) -> int:
        """Blocks stored since the last hole, but on tiers with a doubted medium."""
        doubted = self.status["doubted"]
        held = self._core.tiers(self.number, CERTAIN)
        return sum(count for tier, count in enumerate(held) if doubted >> tier & 1)

    @property
    def counts(self) -> Counter[str]:
        """The counters, by name."""
        status = self.status
        core = Counter(
            removed_unknown=status["removed_unknown"],
            restored_with_other_tokens=status["restored_with_other_tokens"],
            over_limit=status["over_limit"],
            copied_unknown=status["copied_unknown"],
        )
        return +(self._counts + core)

    def count(self, name: str) -> None:
        """Adds one to a counter."""
        self._counts[name] += 1

    @property
    def names_salts(self) -> bool | None:
        """Whether its stores would name a cache salt; None before it is known.

        If they would not, a salted block looks like an unsalted one.
        """
        return _either(new=self._core.layout(self.number)[0], known=self._names_salts)

    @property
    def names_loras(self) -> bool | None:
        """Whether its stores would name an adapter; None before it is known."""
        return _either(new=self._core.layout(self.number)[1], known=self._names_loras)

    def trust(self, *, trusted: bool) -> None:
        """Sets whether its certain blocks count as certain now."""
        self.trusted = trusted

    @property
    def is_special(self) -> bool:
        """Whether its messages have to be looked at one by one now."""
        return bool(self.store_media) or self._decodes_all

    @property
    def _decodes_all(self) -> bool:
        """Whether each of its messages has to be decoded now."""
        return self.orphans.bytes > 0 or self.is_heard  # each store may be an orphan's parent's

    @property
    def is_heard(self) -> bool:
        """Whether somebody listens to all that it stores now."""
        listener = self._stored.listener
        return listener is not None and listener.listens(self.worker)

    def resume(self) -> None:
        """Notes that its blocks were changed by others than its feed, which begins now."""
        status = self.status
        self._learn_block_size(status["block_size"])
        self._may_be_uncertain = self.uncertain_blocks > 0
        self._over_limit = status["over_limit"]
        self._turnover.begin(status["removed_certain"])

    def note_rules(self, rules: ReuseRules) -> None:
        """Notes how its engine announces and reuses blocks; what its feed showed still holds."""
        self._rules = rules
        self._core.drop_last(self.number, rules.draft_drop)
        if rules.announces_copies:
            self._core.announce_copies(self.number)

    def watch(
        self, slot: int, prompt: Prompt, block_size: int, numbers: Collection[int] = ()
    ) -> bool:
        """Watches from now on whether the last block of a prompt that can be reused is stored.

        slot: less than WATCHED_PROMPTS; the prompt that it watched before is forgotten. block_size:
        in tokens. numbers: those that its events may have for the prompt's adapter. Returns False
        if it cannot: the prompt may be stored in too many ways.
        """
        ways = list(self._ways(prompt, numbers))
        if len(ways) > _WAYS:
            return False
        ways += [(_NO_TOKENS, None, None)] * (_WAYS - len(ways))
        for at, (tokens, lora, first) in enumerate(ways, slot * _WAYS):
            self._core.watch(self.number, at, tokens, lora, first, block_size)
        return True

    def was_stored(self, slot: int) -> bool:
        """Returns whether the prompt watched in a slot was stored since, whatever became of it."""
        slots = range(slot * _WAYS, (slot + 1) * _WAYS)
        return any(self._core.was_stored(self.number, at) for at in slots)

    def removed_at(self, prompt: Prompt, blocks: int, numbers: Collection[int]) -> float | None:
        """Returns when it last removed the block of a prompt behind so many of its blocks.

        By the time told last before (`Index.note_time`); None if it is not remembered. numbers: as
        for `watch`.
        """
        ways = self._ways(prompt, numbers)
        found = [self._core.removed_at(self.number, *way, blocks) for way in ways]
        return max((at for at in found if at is not None), default=None)

    def _ways(
        self, prompt: Prompt, numbers: Collection[int]
    ) -> Iterator[tuple[Tokens | memoryview, str | int | None, bytes | None]]:
        """Yields tokens, adapter and extra keys of each way in which its events may name a prompt.

        An adapter may be known by number only, and pages may be of bigrams (`Index.overlaps`).
        """
        first = encoded(prompt.namespace)
        yield prompt.tokens, prompt.lora, first
        if isinstance(prompt.lora, str):
            for number in {*numbers, *self._stored.numbered.get(self, ())}:
                yield prompt.tokens, number, first
        if self.model in self._stored.bigrams and prompt.tokens:
            pair = encoded((prompt.tokens[0], *prompt.namespace))
            yield memoryview(prompt.tokens)[1:], prompt.lora, pair

    def other_groups(self) -> OtherGroups:
        """Returns what is known of its other attention groups."""
        return OtherGroups(*self._core.other_groups(self.number))

    def applying(self, body: Body) -> Steps[BatchResult]:
        """Applies one message of the feed in steps, by the core if its format is as expected.

        Raises:
            WireError: it is not an event batch; nothing was changed.
        """
        outcome: Outcome | None = None
        is_decoded = self._decodes_all or names_media(body, self.store_media)
        if isinstance(body, bytes) and not is_decoded:
            progress = self._core.start(self.number, body, WORK)
            outcome = (yield from self._proceeding()) if progress is True else progress or None
        return (yield from self.finishing(body, outcome))

    def finishing(self, body: Body, outcome: Outcome | None) -> Steps[BatchResult]:
        """Applies what the core has left of a message, in steps.

        outcome: what the core has done; None if nothing.

        Raises:
            WireError: it is not an event batch; nothing was changed.
        """
        done, events, clears, faults = outcome or NOTHING_APPLIED
        if done == events and OTHER_LOCALITY not in faults:
            return self._report(faults, clears=clears, removal_lost=False)
        steps = self._applying_rest(body, outcome)
        return (yield from (steps if self.gate is None else self.gate.passing(steps)))

    def _applying_rest(self, body: Body, outcome: Outcome | None) -> Steps[BatchResult]:
        """Applies what the core has left, and what is in a store, which it has left as well."""
        done, events, clears, faults = outcome or NOTHING_APPLIED
        removal_lost = False
        if done != events:  # the rest is for the decoder
            if outcome is None:
                self._core.begin_message(self.number)
            batch = (yield from decoding(body, done)) if isinstance(body, bytes) else body
            own, shared = parted(batch.events, self.store_media)
            faults += batch.faults + (yield from self.applying_events(own))
            if self.store is not None and shared:
                yield from self._storing_shared(shared, self.store)
            clears, removal_lost = clears or batch.clears, batch.removal_lost
            if removal_lost:
                yield from self.demoting()
        if self.store is not None and OTHER_LOCALITY in faults and isinstance(body, bytes):
            yield from self._sharing(body, self.store)
            faults = tuple([name for name in faults if name != OTHER_LOCALITY])
        return self._report(faults, clears=clears, removal_lost=removal_lost)

    def _sharing(self, body: bytes, store: "Owner") -> Steps[None]:
        """Applies the events of a message that name the store's locality to it, in steps."""
        self.shares = True
        events = yield from decoding_shared(body)
        for event in events:
            if isinstance(event, BlocksCopied):
                yield from self._lending(event, store)
            else:
                yield from store.applying_events([event])
        store.note_block_size()

    def _storing_shared(self, events: Sequence[Event], store: "Owner") -> Steps[None]:
        """Applies events of the store's media to it, in steps.

        MooncakeStoreConnector (vLLM 0.32) names the engine's own hashes, with their group, but
        neither adapters nor salts: its blocks are those that this rank knows. LMCache (0.5.6) names
        chunks by hashes of its own, so their tokens count; its in-process engine gives the parent 0
        to the first of several whose parent it does not look up.
        """
        self.shares = True
        for event in events:
            if isinstance(event, BlocksStored | BlocksCopied) and event.group is not None:
                yield from self._lending(event, store)
            elif isinstance(event, BlocksStored) and event.parent == 0:
                self.count("chunk_without_parent")
            else:
                yield from store.applying_events([without_copies(event)])
        store.note_block_size()

    def _lending(self, event: BlocksCopied | BlocksStored, store: "Owner") -> Steps[None]:
        """Has a store hold blocks that this rank knows by their hashes."""
        is_known = self._core.admission(self.number, event.group) == Admission.INDEXED
        hashes = event.hashes if is_known else []
        for begin in range(0, len(hashes), _COPIES):
            some = hashes[begin : begin + _COPIES]
            self._core.lend(store.number, self.number, some, event.medium, event.group)
            yield

    def note_block_size(self) -> None:
        """Notes the block size of its last store."""
        size = self.status["block_size"]
        if size != (self.block_size or 0):
            self._learn_block_size(size)

    def applying_events(self, events: Iterable[Event]) -> Steps[tuple[str, ...]]:
        """Applies events in order, in steps; returns the names of those skipped.

        If group_without_kind is among them, everything the rank holds is uncertain now.
        """
        faults: list[str] = []
        for event in events:
            fault = yield from self._applying(event)
            if fault:
                faults.append(fault)
            yield
        if DOUBTFUL_GROUP in faults:
            yield from self.demoting()
        return tuple(faults)

    def forgetting(self) -> Steps[None]:
        """Forgets its blocks and formats, in steps: it may be another engine now."""
        self._names_salts = self._names_loras = None
        self._stored.numbered.pop(self, None)
        self._core.forget_layout(self.number)
        self.note_rules(self._rules)
        yield from self._clearing()

    def park(self, orphans: Iterable[Orphan]) -> None:
        """Has blocks wait for their parents, as many as may."""
        for orphan in orphans:
            if self._is_full():
                return
            self.orphans.park(orphan)

    def demoting(self) -> Steps[None]:
        """Makes all its blocks uncertain, in steps: its feed has a hole here.

        Until it is done, some still count as certain, unless the rank is not trusted.
        """
        self._may_be_uncertain |= self.blocks > 0
        self.orphans.clear()
        while not self._core.demote_some(self.number, WORK):
            yield
        self._turnover.begin(self.status["removed_certain"])

    def saving(self, rows: list[bytes]) -> Steps[SavedOwner]:
        """Returns what is known besides the blocks, and appends their rows, in steps.

        Nothing else may change its blocks until it is done.
        """
        saved = SavedOwner(
            self._core.saved_learned(self.number),
            self.blocks,
            self.names_salts,
            self.names_loras,
            tuple(sorted(self._stored.numbered.get(self, ()))),
            self.model in self._stored.bigrams,
        )
        at: int | None = 0
        while at is not None:
            some, at = self._core.saved_rows(self.number, at, ROWS_WORK)
            rows.append(some)
            yield
        return saved

    def restoring(self, saved: SavedOwner, rows: list[bytes]) -> Steps[bool]:
        """Takes what was saved of a rank, in steps; returns whether it could.

        If it could not, it holds nothing, as before.
        """
        is_whole = self._core.put_learned(self.number, saved.learned)
        try:
            for some in rows if is_whole else ():
                at = 0
                while at < len(some):
                    at = self._core.put_rows(self.number, some, at, ROWS_WORK)
                    yield
        except ValueError:
            is_whole = False
        if not is_whole or self.blocks != saved.blocks:
            yield from self.forgetting()
            return False
        self._names_salts, self._names_loras = saved.names_salts, saved.names_loras
        if saved.numbered:
            self._stored.numbered[self] = set(saved.numbered[:MAX_NUMBERED_ADAPTERS])
        if saved.has_bigrams:
            self._stored.bigrams.add(self.model)
        self.resume()
        return True

    def _proceeding(self) -> Steps[Outcome | None]:
        """Continues a long message in the core; gives it up if the steps are stopped early.

        Returns what was applied, None if nothing was.
        """
        progress: Outcome | bool = True
        try:
            while progress is True:
                yield
                progress = self._core.proceed(self.number, WORK)
        finally:
            if progress is True:
                self._core.abandon(self.number)
        return progress or None

    def _report(self, faults: tuple[str, ...], *, clears: bool, removal_lost: bool) -> BatchResult:
        """Reports the result of an applied message."""
        self.note_block_size()
        status = self.status
        over_limit, self._over_limit = status["over_limit"] > self._over_limit, status["over_limit"]
        had_uncertain = self._may_be_uncertain
        if had_uncertain:
            self._may_be_uncertain = self.uncertain_blocks > 0
        renewed = self._turnover.is_waiting and self._is_renewed(status)
        if not (clears or had_uncertain or faults or removal_lost or over_limit or renewed):
            return ALL_TAKEN
        missed = missed_of(faults, removal_lost=removal_lost)
        if over_limit and not missed:
            missed = "it holds more blocks than the index keeps for one rank"
        if missed:
            self._turnover.begin(status["removed_certain"])
        nothing_left = not self._may_be_uncertain and (clears or had_uncertain)
        healed = not missed and (nothing_left or renewed)
        return BatchResult(healed, missed, faults, clears)

    def _is_renewed(self, status: OwnerStatus) -> bool:
        """Whether what it holds unseen does not matter any more, since this message."""
        unknown = status["removed_unknown"] + self._counts.get("removed_unknown", 0)
        return self._turnover.is_complete(status["removed_certain"], unknown, status["blocks"])

    def _learn_block_size(self, block_size: int) -> None:
        """Logs a change, but seldom: a publisher may alternate between two sizes."""
        self.block_size = block_size or None
        self._block_sizes += 1
        if is_logged(self._block_sizes):
            log.info("%s: block size learned: %s", self.worker, block_size)

    def _clearing(self) -> Steps[None]:
        """Forgets its blocks."""
        self.orphans.clear()
        while not self._core.clear_some(self.number, WORK):
            yield
        self._may_be_uncertain = False
        self._turnover.begin(self.status["removed_certain"])

    def _applying(self, event: Event) -> Steps[str]:
        """Applies one event; returns the name under which it was skipped, "" if it was not."""
        admission: int = Admission.INDEXED
        match event:
            case BlocksStored():
                holds_prefix = None if event.kind is None else True
                admission = self._core.admit(self.number, event.group, holds_prefix)
                if admission == Admission.INDEXED:
                    yield from self._storing(event)
            case OtherGroupStored():
                admission = self._core.admit(self.number, event.group, OTHER_KIND)
                if admission == Admission.OTHER_GROUP:
                    yield from self._storing_ends(event)
            case BlocksCopied():
                admission = self._core.admission(self.number, event.group)
                if admission == Admission.INDEXED:
                    yield from self._copying(event)
            case BlocksRemoved():
                yield from self._removing(event)
            case _:  # everything was cleared
                yield from self._clearing()
        return ADMISSION_FAULTS.get(admission, "")

    def _note_layout(self, event: BlocksStored) -> None:
        """Notes the layout of a store."""
        self._names_salts = _either(new=event.names_salts, known=self._names_salts)
        self._names_loras = _either(new=event.names_loras, known=self._names_loras)

    def _storing(self, event: BlocksStored) -> Steps[None]:
        self._note_layout(event)
        self._stored.note(self, event)
        may_repeat = event.parent is None and self._may_reuse(event)
        event = self._hearing(event)
        for piece in self._pieces(event):
            result = self._store(piece, may_repeat=may_repeat)
            if result == StoreResult.UNKNOWN_PARENT:
                yield from self._parking(event)
            if result != StoreResult.STORED:
                return
            yield
            if self.orphans:
                for block in piece.hashes:
                    yield from self._attaching(block)

    def _hearing(self, event: BlocksStored) -> BlocksStored:
        """Tells the listener of a store; returns it with its media in the ids of its tokens."""
        listener, names_items = self._stored.listener, has_media(event)
        if listener is not None and (names_items or listener.listens(self.worker)):
            listener.hear(self.worker, event)
        return self._stored.media_ids.with_items(event) if names_items else event

    def _pieces(self, event: BlocksStored) -> Iterator[BlocksStored]:
        """Splits a long chain into several, unless it will be rejected, which costs nothing."""
        size, count = event.block_size, len(event.hashes)
        most = max(1, min(PIECE_TOKENS // size, PIECE_BLOCKS))
        if count <= most or self.blocks + count > self.limits.blocks:
            yield event
            return
        for begin in range(0, count, most):
            end = begin + most
            yield msgspec.structs.replace(
                event,
                hashes=event.hashes[begin:end],
                parent=event.hashes[begin - 1] if begin else event.parent,
                tokens=event.tokens[begin * size : end * size],
                extras=event.extras and event.extras[begin:end],
            )

    def _store(self, event: BlocksStored, *, may_repeat: bool) -> int:
        extras = [encoded(extra) for extra in event.extras] if event.extras else None
        return self._core.store(
            self.number,
            event.hashes,
            event.parent,
            event.tokens,
            event.block_size,
            event.lora,
            extras,
            event.medium,
            event.group,
            may_repeat,
        )

    def _copying(self, event: BlocksCopied) -> Steps[None]:
        before = self._core.status(self.number)["over_limit"]
        for begin in range(0, len(event.hashes), _COPIES):
            some = event.hashes[begin : begin + _COPIES]
            self._core.copy(self.number, some, event.medium, event.group)
            if self._core.status(self.number)["over_limit"] > before:
                return
            yield

    def _parking(self, event: BlocksStored) -> Steps[None]:
        for orphan in orphans_of(event):
            self.count("orphaned")
            if self._is_full():
                self.count("orphans_over_limit")
                return
            self.orphans.park(orphan)
            yield

    def _attaching(self, block: BlockHash) -> Steps[None]:
        """Stores the orphans of a block that arrived, and then the orphans of each of those."""
        turned_up = [block]
        while turned_up:
            parent = turned_up.pop()
            for orphan in self.orphans.take(parent):
                for _ in range(orphan.copies):
                    self._store_orphan(parent, orphan)
                turned_up.append(orphan.block)
                yield

    def _store_orphan(self, parent: BlockHash, orphan: Orphan) -> None:
        self._core.store(
            self.number,
            [orphan.block],
            parent,
            memoryview(orphan.tokens).cast("I"),
            orphan.pool.block_size,
            None,  # the adapter is in the parent's key
            None if orphan.extra is None else [orphan.extra],
            orphan.pool.medium,
            orphan.pool.group,
            MAY_REPEAT,  # what brought its parent may have announced it again, too
        )

    def _storing_ends(self, event: OtherGroupStored) -> Steps[None]:
        """Notes a group, and the blocks of it that are on the device."""
        if tier_of(event.medium) is not Tier.DEVICE:
            return
        if event.block_size or event.hashes:
            self._core.note_group(self.number, event.group, event.block_size, event.reach)
        may_repeat = event.is_root and not event.is_sparse and self._may_reuse(event)
        if may_repeat and len(event.hashes) > event.need:
            return  # it announces what it reuses, and names blocks that it does not hold
        for begin in range(0, len(event.hashes), _COPIES):
            before = self._core.status(self.number)["over_limit"]
            some = event.hashes[begin : begin + _COPIES]
            self._core.store_ends(self.number, some, event.group, may_repeat)
            if self._core.status(self.number)["over_limit"] > before:
                return
            yield

    def _may_reuse(self, event: OtherGroupStored | BlocksStored) -> bool:
        """Whether the engine could have reused any part of the prompt of this store before."""
        return self._core.may_reuse(self.number, event.hashes, event.block_size)

    def _removing(self, event: BlocksRemoved) -> Steps[None]:
        lefts = event.remaining_copies or repeat(None, len(event.hashes))
        admission = self._core.admission(self.number, event.group)
        is_end = admission == Admission.OTHER_GROUP and tier_of(event.medium) is Tier.DEVICE
        for block, left in zip(event.hashes, lefts, strict=True):
            yield
            if is_end:
                self._core.remove_end(self.number, block, event.group, left)
                continue
            held = self._core.remove(self.number, block, event.medium, event.group, left)
            if held or self.orphans.remove(event.medium, event.group, block):
                continue
            if self._core.admission(self.number, event.group) == Admission.INDEXED:
                self.count("removed_unknown")

    def _is_full(self) -> bool:
        """Whether there is no room for more orphans."""
        orphans, limits = self.orphans, self.limits
        return len(orphans) >= limits.orphans or orphans.bytes >= limits.orphan_bytes


def _either(*, new: bool | None, known: bool | None) -> bool | None:
    return known if new is None else new or bool(known)
