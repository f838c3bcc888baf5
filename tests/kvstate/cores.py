"""Empty indexes and cores, with a secret that stays the same."""

from kvstate.index.core import Core
from kvstate.index.index import Index
from kvstate.index.owner import IndexLimits
from kvstate.overlap import Overlap

SECRET = 12345678


def new_index(secret: int = SECRET, limits: IndexLimits | None = None) -> Index:
    """An empty index."""
    return Index(secret, limits)


def new_core(limit_blocks: int = 10) -> Core:
    """An empty core."""
    return Core(SECRET, limit_blocks, Overlap)
