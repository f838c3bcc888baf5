"""Shared fixtures of the gateway tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gateways.install import MissingError, binary
from tests.tables import Table, add_row

_RAN = Table("gateways", "what ran", ())


@pytest.fixture(scope="session")
def program() -> Callable[[str], Path]:
    """Finds an installed program by its name, or skips the test and says how to install it."""

    def find(name: str) -> Path:
        try:
            return binary(name)
        except MissingError as error:
            pytest.skip(str(error))

    return find


@pytest.fixture
def ran(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line to the summary of the run: the gateway, its version, what it did."""
    return lambda line: add_row(request.node, _RAN, line)
