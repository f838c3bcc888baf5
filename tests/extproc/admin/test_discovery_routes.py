from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from extproc.address import Address
from extproc.admin.application import listen
from extproc.admin.routes import discovery_routes
from extproc.config.reader import parse
from extproc.discovery.discovery import Discovery
from extproc.discovery.view import listed
from extproc.workers.workers import Workers
from kvstate.fleet import Fleet


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """An admin server of one worker."""
    config = parse('models: [{name: a}]\nworkers: [{endpoint: "127.0.0.1:1"}]', "c")
    workers = Workers(config, Fleet(1, lambda: 0.0), lambda _: [])
    discovery = Discovery(listed(config.workers), [], workers.replace)
    application = web.Application()
    application.add_routes(discovery_routes(workers, discovery))
    runner = await listen(application, Address("127.0.0.1", 0), "admin")
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as one:
        yield one


async def test_every_source_is_shown(url: str, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{url}/discovery") as response:
        (source,) = await response.json()
    assert (source["source"], source["workers"], source["fault"]) == ("workers", 1, "")


async def test_a_worker_is_drained_and_gets_requests_again(
    url: str, session: aiohttp.ClientSession
) -> None:
    for draining, expected in ((True, ["127.0.0.1:1"]), (False, [])):
        body = {"endpoint": "127.0.0.1:1", "draining": draining}
        async with session.post(f"{url}/draining", json=body) as response:
            assert await response.json() == {"draining": expected}
        async with session.get(f"{url}/draining") as response:
            assert await response.json() == {"draining": expected}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ([], 400),
        ({"endpoint": 1, "draining": True}, 400),
        ({"endpoint": "127.0.0.1:1", "draining": "yes"}, 400),
        ({"endpoint": "127.0.0.1:2", "draining": True}, 404),
    ],
)
async def test_what_makes_no_sense_is_refused(
    url: str, session: aiohttp.ClientSession, body: object, status: int
) -> None:
    async with session.post(f"{url}/draining", json=body) as response:
        assert response.status == status
        assert "error" in await response.json()
