"""The offload tier: blocks that were evicted from the device and kept in the host's memory.

Pure, as the cache that it belongs to. A block found here is copied back and stays here too.
"""

from collections import OrderedDict
from collections.abc import Iterator

from simulator.events import BlockStored


class HostTier:
    """Room for `blocks` blocks; those that were kept or found longest ago are lost first."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._kept: OrderedDict[bytes, BlockStored] = OrderedDict()
        # Of blocks on the device: what there will be to say when they come here.
        self._on_device: dict[bytes, BlockStored] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[bytes]:
        """The digests of all blocks here."""
        return iter(self._kept)

    def holds(self, digest: bytes) -> bool:
        """Whether this block is here."""
        return digest in self._kept

    def touch(self, digest: bytes) -> None:
        """This block was found."""
        if digest in self._kept:
            self._kept.move_to_end(digest)

    def learn(self, digest: bytes, stored: BlockStored) -> None:
        """A block came to be on the device; `stored` announces it alone."""
        self._on_device[digest] = stored

    def keep(self, digest: bytes) -> tuple[BlockStored | None, bytes | None]:
        """The device lost its last copy of a block.

        What announces it here, unless it was here or never will be, and the digest of the block
        that had to go for it, if one had to.
        """
        stored = self._on_device.pop(digest, None)
        if stored is None or digest in self._kept:
            self.touch(digest)
            return None, None
        lost = self._kept.popitem(last=False)[0] if len(self._kept) == self._blocks else None
        self._kept[digest] = stored
        return stored, lost

    def clear(self) -> None:
        """Lose everything."""
        self._kept.clear()
        self._on_device.clear()
