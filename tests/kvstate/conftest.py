"""Runs the tests of both cores on both."""

from collections.abc import Iterator

import pytest

from tests.kvstate.cores import CHOSEN_CORE, needs_compiled_core


@pytest.fixture(params=["plain", pytest.param("compiled", marks=needs_compiled_core)])
def each_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every `new_index` of a test has the plain core, then the compiled one."""
    token = CHOSEN_CORE.set(request.param == "compiled")
    yield
    CHOSEN_CORE.reset(token)
