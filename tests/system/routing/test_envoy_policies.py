"""A real Envoy's own policies choose the same endpoints as those that whatif plays."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from kvtools.whatif.envoy_policies import BoundedLoads, MaglevTable, Ring, hash_of
from tests.ports import free_port
from tests.system.envoy_process import running_envoy
from tests.system.gateway import served
from tests.system.ingresses.existing_envoy import address, load_assignment
from tests.waiting import until

HEADER = "x-session-id"
SESSIONS = [f"session-{number}" for number in range(60)]


def envoy_yaml(listen: int, admin: int, endpoints: list[str], cluster: dict[str, Any]) -> str:
    route = {"cluster": "engines", "hash_policy": [{"header": {"header_name": HEADER}}]}
    hosts = [
        {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
    ]
    of_type = "type.googleapis.com/envoy.extensions.filters."
    manager = {
        "@type": f"{of_type}network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": hosts},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{of_type}http.router.v3.Router"},
            }
        ],
    }
    chain = {"filters": [{"name": "manager", "typed_config": manager}]}
    tree = {
        "admin": {"address": address("127.0.0.1", admin)},
        "static_resources": {
            "listeners": [{"address": address("127.0.0.1", listen), "filter_chains": [chain]}],
            "clusters": [
                {
                    "name": "engines",
                    "type": "STATIC",
                    "load_assignment": load_assignment("engines", endpoints),
                    **cluster,
                }
            ],
        },
    }
    return yaml.safe_dump(tree)


class Engines:
    """Engines behind a real Envoy.

    arrived: the engine of each request, in order. release: lets all requests end.
    """

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self.release = asyncio.Event()

    def have_got(self, requests: int) -> bool:
        return len(self.arrived) == requests

    def app(self, number: int) -> web.Application:
        async def answer(_: web.Request) -> web.Response:
            self.arrived.append(number)
            await self.release.wait()
            return web.Response()

        app = web.Application()
        app.router.add_get("/", answer)
        return app


@contextlib.asynccontextmanager
async def engines_behind(
    count: int, cluster: dict[str, Any]
) -> AsyncIterator[tuple[Engines, list[str], str]]:
    """Runs engines, and an Envoy; yields the engines, their addresses, and Envoy's URL."""
    engines = Engines()
    async with contextlib.AsyncExitStack() as stack:
        ports = [free_port() for _ in range(count)]
        for number, port in enumerate(ports):
            await stack.enter_async_context(served(engines.app(number), port))
        addresses = [f"127.0.0.1:{port}" for port in ports]
        listen, admin = free_port(), free_port()
        text = envoy_yaml(listen, admin, addresses, cluster)
        await stack.enter_async_context(running_envoy(text, admin))
        yield engines, addresses, f"http://127.0.0.1:{listen}/"


@pytest.mark.parametrize("kind", [Ring, MaglevTable])
@pytest.mark.parametrize("count", [3, 8])
async def test_envoy_sends_each_session_where_whatif_does(
    kind: type[Ring] | type[MaglevTable], count: int
) -> None:
    policy = "RING_HASH" if kind is Ring else "MAGLEV"
    async with (
        engines_behind(count, {"lb_policy": policy}) as (engines, addresses, url),
        aiohttp.ClientSession() as client,
    ):
        engines.release.set()
        for session in SESSIONS:
            async with client.get(url, headers={HEADER: session}) as response:
                assert response.status == 200
        table = kind(addresses)
        assert engines.arrived == [table.endpoint(hash_of(one)) for one in SESSIONS]


@pytest.mark.parametrize("factor", [125, 150])
async def test_envoy_passes_over_the_same_busy_endpoints(factor: int) -> None:
    bounds = {"consistent_hashing_lb_config": {"hash_balance_factor": factor}}
    cluster = {"lb_policy": "RING_HASH", "common_lb_config": bounds}
    async with (
        engines_behind(5, cluster) as (engines, addresses, url),
        aiohttp.ClientSession() as client,
        asyncio.TaskGroup() as requests,
    ):
        bounded, active = BoundedLoads(Ring(addresses), 5, factor), [0] * 5
        expected = []
        for count, session in enumerate(SESSIONS, start=1):
            headers = {HEADER: session if count % 3 else SESSIONS[0]}
            requests.create_task(client.get(url, headers=headers))
            await until(partial(engines.have_got, count))
            expected.append(bounded.endpoint(hash_of(headers[HEADER]), active))
            active[expected[-1]] += 1
        engines.release.set()
        assert engines.arrived == expected
        own = Ring(addresses).endpoint(hash_of(SESSIONS[0]))
        assert any(one != own for one in expected[2::3])
