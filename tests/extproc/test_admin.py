from collections.abc import AsyncIterator
from random import Random

import aiohttp
import pytest

from extproc.address import Address
from extproc.admin import admin_application, listen, metrics_application
from extproc.config.reader import parse
from extproc.errors import StartError
from extproc.metrics import Metrics
from extproc.router import Router
from extproc.workers.workers import Workers
from kvstate.core_choice import default_core_name
from kvstate.fleet import Fleet
from tests.e2e.envoy_process import free_port

CONFIG = "models: [{name: m}]\nworkers: [{endpoint: '127.0.0.1:1'}]"


@pytest.fixture
async def admin() -> AsyncIterator[str]:
    config = parse(CONFIG, "c")
    workers = Workers(config, Fleet(12345678, lambda: 0.0), lambda _: [])
    await workers.start()
    router = Router(config, workers, {}, Metrics(), Random(0))
    place = Address("127.0.0.1", free_port())
    runner = await listen(admin_application(router, workers, 1000, "127.0.0.1"), place, "admin")
    yield f"http://{place}"
    await runner.cleanup()
    router.close()
    await workers.close()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_the_first_page_says_which_core_runs(
    admin: str, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{admin}/") as response:
        about = await response.json()
    assert (about["index_core"], about["index_bytes"] >= 0) == (default_core_name(), True)


async def test_workers_are_a_list(admin: str, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{admin}/workers") as response:
        assert [worker["endpoint"] for worker in await response.json()] == ["127.0.0.1:1"]


async def test_a_request_is_explained(admin: str, client: aiohttp.ClientSession) -> None:
    body = {"path": "/v1/completions", "headers": {}, "body": {"model": "m", "prompt": [1, 2]}}
    async with client.post(f"{admin}/explain", json=body) as response:
        answer = await response.json()
    assert (answer["prompt_tokens"], answer["pick"]) == (2, ["127.0.0.1:1"])


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("explain", b"{"),
        ("explain", b"[]"),
        ("explain", b'{"path": 5}'),
        ("events", b'{"enabled": 1}'),
        ("events", b"[]"),
    ],
)
async def test_what_makes_no_sense_is_answered_400(
    admin: str, client: aiohttp.ClientSession, path: str, content: bytes
) -> None:
    async with client.post(f"{admin}/{path}", data=content) as response:
        assert response.status == 400
        assert "error" in await response.json()


async def test_events_are_switched(admin: str, client: aiohttp.ClientSession) -> None:
    async with client.post(f"{admin}/events", json={"enabled": False}) as response:
        assert await response.json() == {"enabled": False}
    async with client.get(f"{admin}/events") as response:
        assert await response.json() == {"enabled": False}


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://[::1"},
        {"Origin": "null"},
    ],
)
async def test_requests_of_other_sites_are_refused(
    admin: str, client: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    async with client.get(f"{admin}/workers", headers=headers) as response:
        assert response.status == 403


@pytest.mark.parametrize("host", ["localhost:1234", "[::1]:9", "127.0.0.1"])
async def test_loopback_names_are_served(
    admin: str, client: aiohttp.ClientSession, host: str
) -> None:
    headers = {"Host": host, "Origin": f"http://{host}"}
    async with client.get(f"{admin}/workers", headers=headers) as response:
        assert response.status == 200


async def test_a_taken_port_is_told_in_one_line(admin: str) -> None:
    port = int(admin.rpartition(":")[2])
    application = metrics_application(Metrics(), lambda: True)
    with pytest.raises(StartError, match=rf"metrics\.listen: cannot listen on 127\.0\.0\.1:{port}"):
        await listen(application, Address("127.0.0.1", port), "metrics")


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
async def test_scrapers_see_metrics_health_and_readiness(
    client: aiohttp.ClientSession, *, ready: bool, status: int
) -> None:
    place = Address("127.0.0.1", free_port())
    runner = await listen(metrics_application(Metrics(), lambda: ready), place, "metrics")
    async with client.get(f"http://{place}/readyz") as response:
        assert response.status == status
    async with client.get(f"http://{place}/healthz") as response:
        assert response.status == 200
    async with client.get(f"http://{place}/metrics") as response:
        assert "kvsteer_open_streams 0.0" in await response.text()
    await runner.cleanup()
