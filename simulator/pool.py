"""The physical blocks: who uses them, what they hold, and which is overwritten next.

A block nobody uses waits in one queue, with or without reusable content, and is taken from its
front; released blocks with content go to its back, which makes it least-recently-used.
"""

from collections import OrderedDict
from collections.abc import Iterable

_RESERVED = 1  # vLLM keeps block 0 as a placeholder ("null block"): N blocks hold N - 1


class BlockPool:
    """`blocks` counts as vLLM's --num-gpu-blocks-override does, the reserved block included."""

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
        """All reusable content."""
        return list(self._copies)

    def content(self, block: int) -> bytes | None:
        """What this block holds, if it was ever full."""
        return self._digests[block]

    def find(self, digest: bytes) -> int | None:
        """A block that holds this content."""
        copies = self._copies.get(digest)
        return None if copies is None else next(iter(copies))

    def is_unused(self, block: int) -> bool:
        """Whether no request uses this block."""
        return block in self._queue

    def share(self, block: int) -> None:
        """One more request uses this block."""
        self._queue.pop(block, None)
        self._references[block] += 1

    def take(self) -> tuple[int, bytes | None]:
        """The next unused block for one request, and the content that is lost with it, if any."""
        block, _ = self._queue.popitem(last=False)
        self._references[block] = 1
        return block, self._forget(block)

    def fill(self, block: int, digest: bytes) -> None:
        """The block is full now and can be found by its content."""
        self._digests[block] = digest
        self._copies.setdefault(digest, OrderedDict())[block] = None

    def release(self, blocks: Iterable[int]) -> None:
        """One request stops using these; they queue in the order given."""
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self._queue[block] = None
                # Nothing is lost with a block that was never full, so it goes first.
                if self._digests[block] is None:
                    self._queue.move_to_end(block, last=False)

    def clear(self) -> None:
        """Forget all content; the queue keeps its order."""
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
