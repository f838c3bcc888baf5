"""One segment of a rank's blocks: which hashes it holds, how often, and under which keys."""

from collections import Counter, defaultdict
from collections.abc import Collection
from typing import NamedTuple

from kvstate.events import BlockHash
from kvstate.tiers import ORDER_OF_MEDIUM, Tier, tier_of

# Block key -> the bits of all segments that hold it.
Table = dict[int, int]


class Pool(NamedTuple):
    """Where copies of a block are counted together: engines remove by medium, group and hash."""

    medium: str
    group: int | None
    block_size: int
    tier: Tier

    @classmethod
    def of(cls, medium: str, group: int | None, block_size: int) -> "Pool":
        """The pool of a stored event; its medium is one that `tier_of` knows."""
        tier = tier_of(medium)
        if tier is None:
            raise ValueError("events of unknown media never reach the index")
        return cls(medium, group, block_size, tier)

    @property
    def order(self) -> tuple[int, int, int]:
        """In which order the pools of an owner are searched, the same in both cores."""
        return (
            ORDER_OF_MEDIUM[self.medium],
            -1 if self.group is None else self.group,
            self.block_size,
        )


class Segment:
    """Blocks of one rank that share a degree of certainty.

    first_bit: of the four bits (one a tier) that it owns in every row of the table.
    """

    def __init__(self, table: Table, first_bit: int) -> None:
        self.first_bit = first_bit
        self._table = table
        self._pools: dict[Pool, dict[BlockHash, int]] = {}  # in their order
        self._copies: dict[tuple[Pool, BlockHash], int] = {}  # where more than one
        self._ages: dict[tuple[Pool, BlockHash], int] = {}  # of blocks that age instead
        self._sharers: dict[tuple[Tier, int], int] = {}  # hashes with one key, where more than one

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._pools.values())

    @property
    def block_sizes(self) -> set[int]:
        """Block sizes in use."""
        return {pool.block_size for pool in self._pools}

    def count_by_tier(self) -> Counter[Tier]:
        """Hashes held on each tier."""
        counts: Counter[Tier] = Counter()
        for pool, blocks in self._pools.items():
            counts[pool.tier] += len(blocks)
        return counts

    def find(self, block: BlockHash) -> tuple[Pool, int] | None:
        """The pool and key of a block held under this hash, on the nearest medium."""
        for pool, blocks in self._pools.items():
            if block in blocks:
                return pool, blocks[block]
        return None

    def store(self, pool: Pool, block: BlockHash, key: int, age: int = 0) -> bool:
        """Holds one more copy; False if the hash stood for other tokens, which are forgotten.

        age: in which it was stored, if copies of this medium are not counted; else 0.
        """
        known = self._pools.get(pool, {}).get(block)
        if known == key:
            if age:
                self._ages[pool, block] = age
                return True
            self._copies[pool, block] = self._copies.get((pool, block), 1) + 1
            return True
        if known is not None:
            self.forget(pool, block)
        if age:
            self._ages[pool, block] = age
        if pool not in self._pools:
            self._add(pool)
        self._pools[pool][block] = key
        self._share(pool.tier, key)
        return known is None

    def count(self, pool: Pool, block: BlockHash, copies: int) -> None:
        """Sets how many copies there are of a block."""
        if copies > 1:
            self._copies[pool, block] = copies

    def remove(self, medium: str, group: int | None, block: BlockHash) -> bool:
        """Drops one copy; False if there was none."""
        for pool, blocks in self._pools.items():
            if pool.medium == medium and pool.group == group and block in blocks:
                copies = self._copies.pop((pool, block), 1)
                if copies == 1:
                    self._unshare(pool.tier, self._pop(pool, block))
                elif copies > 2:  # noqa: PLR2004 - one copy is not written down
                    self._copies[pool, block] = copies - 1
                return True
        return False

    def forget(self, pool: Pool, block: BlockHash) -> None:
        """Drops all copies of a block, if there are any."""
        if block in self._pools.get(pool, ()):
            self._copies.pop((pool, block), None)
            self._unshare(pool.tier, self._pop(pool, block))

    def clear(self, most: int) -> bool:
        """Drops so many blocks at the most; whether none is left."""
        for _ in range(most):
            if not self._pools:
                break
            pool, block, _ = self._last()
            self.forget(pool, block)
        return not self._pools

    def move_to(self, other: "Segment", most: int) -> bool:
        """Drops so many blocks at the most, and holds them there; whether none is left.

        Copies that both had count once.
        """
        for _ in range(most):
            if not self._pools:
                break
            pool, block, key = self._last()
            copies, age = self._copies.get((pool, block), 1), self._ages.get((pool, block), 0)
            self.forget(pool, block)
            other.forget(pool, block)
            other.store(pool, block, key, age)
            other.count(pool, block, copies)
        return not self._pools

    def expire(self, media: Collection[str], age: int) -> None:
        """Drops what was stored on these media before this age."""
        for (pool, block), stored in list(self._ages.items()):
            if pool.medium in media and stored < age:
                self.forget(pool, block)

    def bits_by_key(self) -> Table:
        """What this segment should have set in the table, made from the hashes alone."""
        bits: defaultdict[int, int] = defaultdict(int)
        for pool, blocks in self._pools.items():
            for key in blocks.values():
                bits[key] |= 1 << self.first_bit + pool.tier
        return dict(bits)

    def _last(self) -> tuple[Pool, BlockHash, int]:
        """One of the blocks, found without a look at all others."""
        pool = next(reversed(self._pools))
        block, key = next(reversed(self._pools[pool].items()))
        return pool, block, key

    def _add(self, pool: Pool) -> None:
        pools = sorted((*self._pools, pool), key=lambda pool: pool.order)
        self._pools = {pool: self._pools.get(pool, {}) for pool in pools}

    def _pop(self, pool: Pool, block: BlockHash) -> int:
        """Takes a hash out; an empty pool goes too, or a publisher could make ever more of them."""
        self._ages.pop((pool, block), None)
        blocks = self._pools[pool]
        key = blocks.pop(block)
        if not blocks:
            del self._pools[pool]
        return key

    def _share(self, tier: Tier, key: int) -> None:
        bit = 1 << self.first_bit + tier
        bits = self._table.get(key, 0)
        if bits & bit:
            self._sharers[tier, key] = self._sharers.get((tier, key), 1) + 1
        else:
            self._table[key] = bits | bit

    def _unshare(self, tier: Tier, key: int) -> None:
        sharers = self._sharers.pop((tier, key), 1)
        if sharers == 1:
            self._mask(key, ~(1 << self.first_bit + tier))
        elif sharers > 2:  # noqa: PLR2004 - one sharer is not written down
            self._sharers[tier, key] = sharers - 1

    def _mask(self, key: int, keep: int) -> None:
        bits = self._table.get(key, 0) & keep
        if bits:
            self._table[key] = bits
        else:
            self._table.pop(key, None)
