"""Which cores can be tested here, and with which one a test runs."""

from contextvars import ContextVar

import pytest

from kvstate.core import Core
from kvstate.index import IS_COMPILED, Index, make_core
from kvstate.owner import IndexLimits

needs_compiled_core = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core was not built: no C compiler at installation"
)

# Whether the test's indexes have the compiled core; None for the default one.
CHOSEN_CORE: ContextVar[bool | None] = ContextVar("chosen_core", default=None)


def new_index(secret: int = 12345678, limits: IndexLimits | None = None) -> Index:
    """An empty index, whose core is the one that `each_core` chose."""
    return Index(secret, limits, compiled=CHOSEN_CORE.get())


def new_core(*, compiled: bool, limit_blocks: int = 10) -> Core:
    """An empty core."""
    return make_core(12345678, limit_blocks, compiled=compiled)
