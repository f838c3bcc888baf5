"""A prefix cache: which blocks a request reuses, fills and overwrites, and which events follow.

Pure: nothing here sleeps, sends or reads a clock. Calls change the state at once and record events,
which `take_events` returns; the calls between two of its calls are one scheduler step. Only full
blocks are reusable and announced.

An unused block waits in one queue, with or without reusable content, and is taken from the front;
released blocks with content go to the back, so the least recently used is taken first. Blocks
evicted from the device may be kept in host memory. A block found there is copied back, and also
stays there.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from kvtools.simulator.dialects import Habits
from kvtools.simulator.events import (
    ATTENTION,
    DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
)
from kvtools.simulator.hashing import CacheNamespace, Hashing, VllmHashing, chain_of

_RESERVED = 1  # vLLM keeps block 0 as a placeholder ("null block"): N blocks hold N - 1
_GROUP = 0  # a model with one kind of attention has one group of caches


@dataclass(slots=True, eq=False)
class Holding:
    """The blocks that one request uses while it runs."""

    namespace: CacheNamespace
    session_id: str | None
    tokens: list[int]
    """All tokens whose KV is computed: the prompt, then all generated ones but the last."""
    cached_tokens: int
    """How many leading tokens of the prompt were found in the cache."""
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Of the full blocks, first to last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a cache, and its engine's habits."""

    blocks: int
    """Blocks on the device, one of them reserved."""
    block_size: int
    """Tokens a block."""
    hashing: Hashing = field(default_factory=VllmHashing)
    habits: Habits = field(default_factory=Habits)
    host_blocks: int = 0
    """Blocks that may be kept off the device."""
    placeholders: bool = False
    """Blocks off the device are announced by their hashes alone."""


class PrefixCache:
    """The cache of one rank."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._hashing = shape.hashing
        self._pool = DeviceBlocks(shape.blocks)
        self._host = HostTier(shape.host_blocks)
        self._block_size = shape.block_size
        self._events: list[Event] = []
        if shape.habits.clears_at_start:
            self._events.append(AllBlocksCleared())

    @property
    def usage(self) -> float:
        """The share of blocks that running requests use, 0 to 1."""
        return 1 - self._pool.unused / self._pool.usable

    @property
    def blocks_held(self) -> tuple[int, int]:
        """Blocks with reusable content, copies included: on the device, and off it."""
        return self._pool.filled, len(self._host)

    def held_tokens(self, prompt: Sequence[int], namespace: CacheNamespace) -> int:
        """Returns how many leading tokens of a prompt are cached, at least one being computed."""
        digests = chain_of(prompt, self._block_size, namespace, self._hashing)
        return sum(1 for _ in self._find(digests, len(prompt))) * self._block_size

    def begin(
        self,
        prompt: Sequence[int],
        namespace: CacheNamespace,
        *,
        session_id: str | None = None,
        reuse: bool = True,
    ) -> Holding | None:
        """Prefills a prompt; returns None, and changes nothing, if too few blocks are unused.

        reuse: if off, the cache is filled but not read, as vLLM does for `prompt_logprobs`.
        """
        digests = list(chain_of(prompt, self._block_size, namespace, self._hashing))
        found = list(self._find(digests, len(prompt))) if reuse else []
        on_device = [block for block in found if block is not None]
        missing = -(-len(prompt) // self._block_size) - len(on_device)
        if missing + sum(map(self._pool.is_unused, on_device)) > self._pool.unused:
            return None
        holding = Holding(namespace, session_id, list(prompt), len(found) * self._block_size)
        holding.digests = digests
        for block, digest in zip(found, digests, strict=False):
            self._host.touch(digest)
            if block is not None:
                self._pool.share(block)
        holding.blocks = [self._take() if block is None else block for block in found]
        holding.blocks += [self._take() for _ in range(missing - found.count(None))]
        self._announce(holding, 0)
        return holding

    def extend(self, holding: Holding, token: int) -> bool:
        """Computes one generated token; returns False, and changes nothing, if no block is left."""
        if len(holding.tokens) == len(holding.blocks) * self._block_size:
            if not self._pool.unused:
                return False
            holding.blocks.append(self._take())
        holding.tokens.append(token)
        full = len(holding.digests)
        window = holding.tokens[full * self._block_size :]
        if len(window) == self._block_size + self._hashing.lookahead:
            parent = holding.digests[-1] if holding.digests else None
            start = full * self._block_size
            digest = self._hashing.block_digest(parent, window, holding.namespace, start)
            holding.digests.append(digest)
            if not self._shape.habits.stores_answers_at_end:
                self._announce(holding, full)
        return True

    def release(self, holding: Holding) -> None:
        """Ends a request. Its last block queues first: a chain is overwritten from its end."""
        if self._shape.habits.stores_answers_at_end:
            self._announce(holding, 0)
        self._pool.release(reversed(holding.blocks))
        holding.blocks = []

    def reset(self) -> bool:
        """Forgets everything; returns False, and changes nothing, while a request runs."""
        if self._pool.unused < self._pool.usable:
            return False
        if self._shape.habits.announces_clear:
            self._events.append(AllBlocksCleared())
        else:
            self._remove(self._pool.digests(), DEVICE)
            self._remove(self._host, self._shape.habits.host_medium)
        self._pool.clear()
        self._host.clear()
        return True

    def take_events(self) -> list[Event]:
        """Returns the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _find(self, digests: Iterable[bytes], prompt_tokens: int) -> Iterator[int | None]:
        """Yields the leading blocks held: their places on the device, or None for those off it."""
        # The engine needs the logits of the last token, so it always computes that token's block.
        usable = (prompt_tokens - 1 - self._hashing.lookahead) // self._block_size
        for _, digest in zip(range(usable), digests, strict=False):
            block = self._pool.find(digest)
            if block is None and not self._host.holds(digest):
                return
            yield block

    def _take(self) -> int:
        block, lost = self._pool.take()
        if lost is not None:
            if self._pool.find(lost) is None:
                self._offload(lost)
            self._remove([lost], DEVICE)
        return block

    def _offload(self, digest: bytes) -> None:
        medium = self._shape.habits.host_medium
        stored, lost = self._host.keep(digest)
        if lost is not None:
            self._remove([lost], medium)
        if stored is None:
            return
        if self._shape.placeholders:
            # vLLM's offloading connector, unless told to describe its blocks.
            self._events.append(BlockStored(stored.block_hashes, None, (), 0, None, medium, None))
        else:
            self._events.append(msgspec.structs.replace(stored, medium=medium))

    def _remove(self, digests: Iterable[bytes], medium: str) -> None:
        hashes = tuple(map(self._hashing.wire, digests))
        if hashes:
            self._events.append(BlockRemoved(hashes, medium, _GROUP))

    def _announce(self, holding: Holding, start: int) -> None:
        """Makes the full blocks from number `start` on reusable; one event per run of new ones."""
        first = None
        for number in range(start, len(holding.digests) + 1):
            if number < len(holding.digests) and self._fill(holding, number):
                first = number if first is None else first
            elif first is not None:
                self._events.append(self._stored(holding, first, number))
                first = None

    def _fill(self, holding: Holding, number: int) -> bool:
        """Fills a block; returns whether it is new to the device."""
        block, digest = holding.blocks[number], holding.digests[number]
        if self._pool.content(block) == digest:
            return False
        copy = self._pool.find(digest) if self._shape.habits.shares_copies else None
        if copy is not None:
            self._pool.share(copy)
            self._pool.release([block])
            holding.blocks[number] = copy
            return False
        self._pool.fill(block, digest)
        if self._shape.host_blocks:
            self._host.learn(digest, self._stored(holding, number, number + 1))
        return True

    def _published_keys(self, namespace: CacheNamespace, number: int) -> tuple[object, ...] | None:
        """Returns the extra keys of a block in the form of events."""
        start = number * self._block_size
        keys = namespace.published_keys(first=not number) or ()
        items = namespace.item_keys(start, start + self._block_size)
        names = namespace.adapter is not None
        return (*keys[:names], *items, *keys[names:]) or None

    def _stored(self, holding: Holding, start: int, end: int) -> BlockStored:
        """Returns the event for the blocks from number `start` to before `end`."""
        namespace, size = holding.namespace, self._block_size
        adapter = namespace.adapter
        tokens = holding.tokens[start * size : end * size + self._hashing.lookahead]
        return BlockStored(
            block_hashes=tuple(map(self._hashing.wire, holding.digests[start:end])),
            parent_block_hash=self._hashing.wire(holding.digests[start - 1]) if start else None,
            token_ids=self._hashing.event_tokens(tokens),
            block_size=size,
            lora_id=adapter.number if adapter else None,
            medium=DEVICE,
            lora_name=adapter.name if adapter else None,
            extra_keys=tuple(self._published_keys(namespace, n) for n in range(start, end)),
            group_idx=_GROUP,
            kv_cache_spec_kind=ATTENTION,
            session_id=holding.session_id,
            cache_salt=namespace.salt,
        )


class DeviceBlocks:
    """The blocks on the device: their users, their content, and the order of eviction.

    blocks: counted as vLLM's --num-gpu-blocks-override does, the reserved block included.
    """

    def __init__(self, blocks: int) -> None:
        self._references = [0] * blocks
        self._digests: list[bytes | None] = [None] * blocks
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(_RESERVED, blocks))
        # Several blocks may hold the same content; the oldest copy serves the hits.
        self._copies: dict[bytes, OrderedDict[int, None]] = {}

    @property
    def usable(self) -> int:
        """Blocks that requests can use."""
        return len(self._references) - _RESERVED

    @property
    def unused(self) -> int:
        """Blocks that no request uses, whether or not their content can be reused."""
        return len(self._queue)

    @property
    def filled(self) -> int:
        """Blocks whose content can be reused, copies included."""
        return sum(map(len, self._copies.values()))

    def digests(self) -> list[bytes]:
        """Returns the digests of all reusable content."""
        return list(self._copies)

    def content(self, block: int) -> bytes | None:
        """Returns the digest of what a block holds, None if it was never full."""
        return self._digests[block]

    def find(self, digest: bytes) -> int | None:
        """Returns a block that holds this content, None if there is none."""
        copies = self._copies.get(digest)
        return None if copies is None else next(iter(copies))

    def is_unused(self, block: int) -> bool:
        """Returns whether no request uses this block."""
        return block in self._queue

    def share(self, block: int) -> None:
        """Counts one more request that uses this block."""
        self._queue.pop(block, None)
        self._references[block] += 1

    def take(self) -> tuple[int, bytes | None]:
        """Gives an unused block to one request; returns it, and the content it lost, if any."""
        block, _ = self._queue.popitem(last=False)
        self._references[block] = 1
        return block, self._forget(block)

    def fill(self, block: int, digest: bytes) -> None:
        """Marks a block as full, so that it can be found by its content."""
        self._digests[block] = digest
        self._copies.setdefault(digest, OrderedDict())[block] = None

    def release(self, blocks: Iterable[int]) -> None:
        """Ends one request's use of these blocks; they queue in the order given."""
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self._queue[block] = None
                # Nothing is lost with a block that was never full, so it goes first.
                if self._digests[block] is None:
                    self._queue.move_to_end(block, last=False)

    def clear(self) -> None:
        """Forgets all content; the queue keeps its order."""
        self._digests = [None] * len(self._digests)
        self._copies.clear()

    def _forget(self, block: int) -> bytes | None:
        digest = self._digests[block]
        if digest is None:
            return None
        self._digests[block] = None
        copies = self._copies[digest]
        del copies[block]
        if not copies:
            del self._copies[digest]
        return digest


class HostTier:
    """Blocks kept in host memory; the least recently kept or found are evicted first."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._kept: OrderedDict[bytes, BlockStored] = OrderedDict()
        # For blocks on the device: the event to send when they move here.
        self._on_device: dict[bytes, BlockStored] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[bytes]:
        """Returns an iterator over the digests of all blocks here."""
        return iter(self._kept)

    def holds(self, digest: bytes) -> bool:
        """Returns whether this block is here."""
        return digest in self._kept

    def touch(self, digest: bytes) -> None:
        """Marks a block as found just now."""
        if digest in self._kept:
            self._kept.move_to_end(digest)

    def learn(self, digest: bytes, stored: BlockStored) -> None:
        """Records a block that is on the device now.

        stored: the event that announces it alone.
        """
        self._on_device[digest] = stored

    def keep(self, digest: bytes) -> tuple[BlockStored | None, bytes | None]:
        """Keeps a block whose last copy on the device was evicted.

        Returns the event that announces it here, None if it was here or cannot be announced, and
        the digest of the block evicted for it, if any.
        """
        stored = self._on_device.pop(digest, None)
        if stored is None or digest in self._kept:
            self.touch(digest)
            return None, None
        lost = self._kept.popitem(last=False)[0] if len(self._kept) == self._blocks else None
        self._kept[digest] = stored
        return stored, lost

    def clear(self) -> None:
        """Loses everything."""
        self._kept.clear()
        self._on_device.clear()
