"""One router for all tests, so that damage by one test shows in the next."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.system.attacks.victim import Victim, running_victim


@pytest.fixture(scope="package")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A router for all tests."""
    with running_victim(tmp_path_factory.mktemp("victim")) as victim:
        yield victim


@pytest.fixture
async def victim(_shared: Victim) -> AsyncIterator[Victim]:
    """The same; connections are closed when the test ends."""
    yield _shared
    _shared.leave()


@pytest.fixture
async def fresh(tmp_path: Path) -> AsyncIterator[Victim]:
    """A new router, which has served nobody yet: to measure what something takes."""
    with running_victim(tmp_path) as victim:
        yield victim
        victim.leave()
