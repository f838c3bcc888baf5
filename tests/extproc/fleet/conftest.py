"""What the tests of questions to workers share: somebody to ask, and somebody who asks."""

from collections.abc import AsyncIterator

import pytest

from extproc.fleet.asking.polling import Client
from tests.extproc.fleet.asked import Engine, client, served


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with served() as one:
        yield one


@pytest.fixture
async def http() -> AsyncIterator[Client]:
    async with client() as one:
        yield one
