from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.extproc.admin.serving import Served, serving


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as one:
        yield one


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
