"""One router for all tests of a kind of server, so that damage by one test shows in the next."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.system.attacks.victim import Victim, running_victim


@pytest.fixture(scope="package")
def _lean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A router on the lean server."""
    with running_victim("lean", tmp_path_factory.mktemp("lean")) as victim:
        yield victim


@pytest.fixture(scope="package", params=["lean", "grpcio"])
def _either(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Victim]:
    """A router on one server, then on the other."""
    with running_victim(request.param, tmp_path_factory.mktemp(request.param)) as victim:
        yield victim


@pytest.fixture
async def lean(_lean: Victim) -> AsyncIterator[Victim]:
    """The same; connections are closed when the test ends."""
    yield _lean
    _lean.leave()


@pytest.fixture
async def either(_either: Victim) -> AsyncIterator[Victim]:
    """The same; connections are closed when the test ends."""
    yield _either
    _either.leave()


@pytest.fixture(params=["lean", "grpcio"])
async def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Victim]:
    """A new router, which has served nobody yet: to measure what something takes."""
    with running_victim(request.param, tmp_path) as victim:
        yield victim
        victim.leave()
