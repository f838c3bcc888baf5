"""An index whose core is the one in plain Python."""

from typing import cast

from kvstate.index.core import Core
from kvstate.index.index import Index
from kvstate.index.owner import IndexLimits
from kvstate.overlap import Overlap
from tests.oracles.plain_core import PlainCore


def plain_core(secret: int, limit_blocks: int) -> Core:
    """Returns a core in plain Python, where one in C is wanted."""
    return cast("Core", PlainCore(secret, limit_blocks, Overlap))


class PlainIndex(Index):
    """The index of the product with this core."""

    def __init__(self, secret: int, limits: IndexLimits | None = None) -> None:
        super().__init__(secret, limits)
        self.core = plain_core(secret, self._limits.blocks)
