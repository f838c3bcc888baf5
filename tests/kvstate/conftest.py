"""Runs the tests of both cores on both."""

import pytest

from kvstate import index
from tests.kvstate.cores import needs_compiled_core


@pytest.fixture(params=["plain", pytest.param("compiled", marks=needs_compiled_core)])
def each_core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every index that a test makes has the plain core, then the compiled one."""
    monkeypatch.setattr(index, "IS_COMPILED", request.param == "compiled")
