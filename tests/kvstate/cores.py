"""Which cores can be tested here."""

import pytest

from kvstate.core import Core
from kvstate.index import IS_COMPILED, make_core

needs_compiled_core = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core was not built: no C compiler at installation"
)


def new_core(*, compiled: bool, limit_blocks: int = 10) -> Core:
    """An empty core."""
    return make_core(12345678, limit_blocks, compiled=compiled)
