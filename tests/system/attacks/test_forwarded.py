"""Who sends a large body waits behind his own: clients cannot say that they are somebody else."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from extproc.serving.preparation import forwarded_for
from tests.http_server import serving
from tests.system.system import CHAT, chat, running
from tests.waiting import until

CLIENT, PROXY = "127.0.0.2", "127.0.0.3"
FORGED = "192.0.2.1"


async def say_what_was_told(request: web.Request) -> web.Response:
    return web.json_response(request.headers.getall("x-forwarded-for", []))


@pytest.fixture
async def worker() -> AsyncIterator[str]:
    """The address of a worker that answers with what it was told of who sent the request."""
    async with serving(say_what_was_told) as address:
        yield address


async def told(envoy: str, sender: str, forwarded: str) -> list[bytes]:
    connector = aiohttp.TCPConnector(local_addr=(sender, 0))
    headers = {"x-forwarded-for": forwarded} if forwarded else {}
    values: list[bytes] = []
    async with aiohttp.ClientSession(connector=connector) as session:

        async def is_answered() -> bool:
            async with session.post(f"{envoy}{CHAT}", json=chat("a"), headers=headers) as answer:
                if answer.status == 200:
                    values.extend(value.encode() for value in await answer.json())
                return answer.status == 200

        await until(is_answered, "answered")
    return values


async def test_client_cannot_choose_whose_queue_its_bodies_wait_in(worker: str) -> None:
    async with running(1, proxied=lambda _: worker) as system:
        for forwarded in ("", FORGED, f"{FORGED}, {FORGED}"):
            seen = await told(system.envoy, CLIENT, forwarded)
            assert forwarded_for(seen, 0) == CLIENT.encode(), forwarded


async def test_client_behind_a_trusted_proxy_is_the_one_that_it_saw(worker: str) -> None:
    hops = {"envoy": {"trusted_hops": 1}}
    async with running(1, changes=hops, proxied=lambda _: worker) as system:
        seen = await told(system.envoy, PROXY, f"{FORGED}, {CLIENT}")
    assert forwarded_for(seen, 1) == CLIENT.encode()


@pytest.mark.parametrize(
    ("values", "hops", "client"),
    [
        ([], 0, b""),
        ([b"a, b"], 0, b"b"),
        ([b"a", b"b,c"], 1, b"b"),
        ([b"a"], 1, b"a"),
        ([b"a,b,c"], 2, b"a"),
    ],
)
def test_address_of_a_client_is_before_those_of_proxies(
    values: list[bytes], hops: int, client: bytes
) -> None:
    assert forwarded_for(values, hops) == client
