"""The block index: which ranks hold the leading blocks of a prompt, exactly.

Every rank (one publisher inside a worker) owns two segments of blocks: what is certain, and what
was stored before a hole in its feed and is uncertain since. A row of the table maps a block key to
a bit set, four bits (one a tier) for each segment.

Invariants, which `check()` verifies:
- a bit is set if and only if some hash of that segment, on a medium of that tier, has that key;
- engine hashes are counted: a hash stored twice is held until it is removed twice;
- a block whose parent is unknown has no key: it waits as an orphan, bounded, and counts for
  nothing until the parent turns up.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvstate.events import (
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    Event,
    Extra,
)
from kvstate.keys import BYTES_PER_TOKEN, KeySpace, chain, child
from kvstate.orphans import Orphan, Orphanage
from kvstate.overlap import Overlap, Prompt
from kvstate.segment import Pool, Segment, Table


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rank may make us remember: a publisher gone wrong must not take the memory."""

    blocks: int = 4_000_000
    orphans: int = 65_536


class Owner:
    """What the index knows of one rank."""

    def __init__(self, worker: str, rank: int, model: str, slot: int, table: Table) -> None:
        self.worker = worker
        self.rank = rank
        self.model = model
        self.trusted = False
        self.block_size: int | None = None
        self.counts: Counter[str] = Counter()
        self.slot = slot
        self.certain = Segment(table, first_bit=8 * slot)
        self.uncertain = Segment(table, first_bit=8 * slot + 4)
        self.orphans = Orphanage()

    @property
    def blocks(self) -> int:
        """Block hashes held, over all media."""
        return len(self.certain) + len(self.uncertain)

    def find(self, block: BlockHash) -> tuple[Segment, int] | None:
        """The segment and key of a block held under this hash; a certain one if there is one."""
        for segment in (self.certain, self.uncertain):
            key = segment.key_of(block)
            if key is not None:
                return segment, key
        return None


class Index:
    """Blocks of all ranks of all workers."""

    def __init__(self, keys: KeySpace, limits: Limits | None = None) -> None:
        self._keys = keys
        self._limits = limits or Limits()
        self._table: Table = {}
        self._owners: dict[int, Owner] = {}

    def add(self, worker: str, rank: int, model: str) -> Owner:
        """Makes room for a rank; it holds nothing and is not trusted yet."""
        slot = next(n for n in range(len(self._owners) + 1) if n not in self._owners)
        owner = self._owners[slot] = Owner(worker, rank, model, slot, self._table)
        return owner

    def remove(self, owner: Owner) -> None:
        """Forgets a rank and frees all it had."""
        self.clear(owner)
        del self._owners[owner.slot]

    def clear(self, owner: Owner) -> None:
        """Forgets everything a rank holds."""
        owner.certain.clear()
        owner.uncertain.clear()
        owner.orphans.clear()

    def demote(self, owner: Owner) -> None:
        """Makes everything a rank holds uncertain: its feed has a hole here."""
        owner.certain.move_to(owner.uncertain)
        owner.orphans.clear()

    def apply(self, owner: Owner, events: Iterable[Event]) -> None:
        """Applies events in their order."""
        for event in events:
            match event:
                case BlocksStored():
                    self._store(owner, event)
                case BlocksRemoved():
                    self._remove_blocks(owner, event)
                case _:  # everything was cleared
                    self.clear(owner)

    def overlaps(self, prompt: Prompt) -> dict[str, Overlap]:
        """The overlap of every worker that holds the prompt's first block, its best rank's.

        At most (tokens - 1) // block size blocks count: an engine always computes the last token.
        """
        best: dict[str, Overlap] = {}
        for block_size in self._block_sizes(prompt.model):
            for owner, overlap in self._overlaps(prompt, block_size):
                known = best.get(owner.worker)
                if known is None or overlap.rank_order > known.rank_order:
                    best[owner.worker] = overlap
        return best

    def blocks_by_tier(self, worker: str) -> tuple[int, int, int, int]:
        """Block hashes that a worker's ranks hold on each tier, certain or not."""
        counts = [0, 0, 0, 0]
        for owner in self._owners.values():
            if owner.worker == worker:
                for segment in (owner.certain, owner.uncertain):
                    for tier, count in segment.count_by_tier().items():
                        counts[tier] += count
        return counts[0], counts[1], counts[2], counts[3]

    def check(self) -> None:
        """Raises AssertionError where an invariant of this module does not hold; slow."""
        expected: Table = {}
        for owner in self._owners.values():
            for segment in (owner.certain, owner.uncertain):
                for key, bits in segment.bits_by_key().items():
                    expected[key] = expected.get(key, 0) | bits
        if expected != self._table:
            raise AssertionError("the table differs from what the segments hold")

    def _store(self, owner: Owner, event: BlocksStored) -> None:
        owner.block_size = event.block_size
        found = None if event.parent is None else owner.find(event.parent)
        if event.parent is not None and found is None:
            self._park(owner, event)
            return
        root = self._keys.root(owner.model, event.lora, event.block_size)
        segment, key = found or (owner.certain, root)
        pool = Pool.of(event.medium, event.group, event.block_size)
        if owner.blocks + len(event.hashes) > self._limits.blocks:
            owner.counts["over_limit"] += 1
            return
        for block, tokens, extra in _blocks(event):
            key = child(key, tokens, extra)
            self._hold(owner, segment, pool, block, key)
            self._attach(owner, segment, block, key)

    def _hold(self, owner: Owner, segment: Segment, pool: Pool, block: BlockHash, key: int) -> None:
        if segment is owner.certain:
            owner.uncertain.forget(pool, block)  # it was stored again since the hole
        if not segment.store(pool, block, key):
            owner.counts["restored_with_other_tokens"] += 1

    def _park(self, owner: Owner, event: BlocksStored) -> None:
        parent = event.parent
        pool = Pool.of(event.medium, event.group, event.block_size)
        for block, tokens, extra in _blocks(event):
            owner.counts["orphaned"] += 1
            if parent is None or len(owner.orphans) >= self._limits.orphans:
                owner.counts["orphans_over_limit"] += 1
                return
            owner.orphans.park(Orphan(parent, pool, block, bytes(tokens), extra))
            parent = block

    def _attach(self, owner: Owner, segment: Segment, block: BlockHash, key: int) -> None:
        """Gives the orphans of a block that turned up their keys, and theirs in turn."""
        turned_up = [(block, key)] if owner.orphans else []
        while turned_up:
            parent, key = turned_up.pop()
            for orphan in owner.orphans.take(parent):
                orphan_key = child(key, orphan.tokens, orphan.extra)
                for _ in range(orphan.copies):
                    self._hold(owner, segment, orphan.pool, orphan.block, orphan_key)
                turned_up.append((orphan.block, orphan_key))

    def _remove_blocks(self, owner: Owner, event: BlocksRemoved) -> None:
        for block in event.hashes:
            held = owner.certain.remove(event.medium, event.group, block)
            held = held or owner.uncertain.remove(event.medium, event.group, block)
            held = held or owner.orphans.remove(event.medium, event.group, block)
            if not held:
                owner.counts["removed_unknown"] += 1

    def _block_sizes(self, model: str) -> set[int]:
        sizes: set[int] = set()
        for owner in self._owners.values():
            if owner.model == model:
                sizes |= owner.certain.block_sizes | owner.uncertain.block_sizes
        return sizes

    def _overlaps(self, prompt: Prompt, block_size: int) -> Iterator[tuple[Owner, Overlap]]:
        runs = self._runs(prompt, block_size)
        first_bits = runs[0][0] if runs else 0
        for owner in self._owners.values():
            if first_bits >> 8 * owner.slot & 0xFF:
                yield owner, _count(runs, owner, block_size)

    def _runs(self, prompt: Prompt, block_size: int) -> list[tuple[int, int]]:
        """The rows of the prompt's blocks as (bits, how many), up to the first that is absent."""
        root = self._keys.root(prompt.model, prompt.lora, block_size)
        limit = (len(prompt.tokens) - 1) // block_size
        runs: list[tuple[int, int]] = []
        current, length = 0, 0
        for key in chain(root, prompt.tokens, block_size, prompt.namespace, limit):
            bits = self._table.get(key)
            if bits == current:
                length += 1
                continue
            if length:
                runs.append((current, length))
            if bits is None:
                return runs
            current, length = bits, 1
        return [*runs, (current, length)] if length else runs


def _blocks(event: BlocksStored) -> Iterator[tuple[BlockHash, memoryview, Extra]]:
    step = event.block_size * BYTES_PER_TOKEN
    view = memoryview(event.tokens).cast("B")
    extras = event.extras or [()] * len(event.hashes)
    for position, (block, extra) in enumerate(zip(event.hashes, extras, strict=True)):
        yield block, view[position * step : (position + 1) * step], extra


def _count(runs: list[tuple[int, int]], owner: Owner, block_size: int) -> Overlap:
    tiers = [0, 0, 0, 0]
    uncertain = 0
    certain_so_far = owner.trusted
    for bits, length in runs:
        certain = bits >> owner.certain.first_bit & 0xF
        if certain_so_far and certain:
            tiers[(certain & -certain).bit_length() - 1] += length
        elif bits >> 8 * owner.slot & 0xFF:
            certain_so_far = False
            uncertain += length
        else:
            break
    return Overlap(block_size, (tiers[0], tiers[1], tiers[2], tiers[3]), uncertain)
