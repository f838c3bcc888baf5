import aiohttp
import pytest

from kvstate.core_choice import default_core_name
from tests.extproc.admin.serving import Served


async def test_programs_are_told_which_core_runs(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{served.url}/") as response:
        about = await response.json()
    assert (about["index_core"], about["index_bytes"] >= 0) == (default_core_name(), True)


async def test_workers_are_a_list(served: Served, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{served.url}/workers") as response:
        assert [worker["endpoint"] for worker in await response.json()] == ["127.0.0.1:1"]


async def test_a_request_is_explained(served: Served, client: aiohttp.ClientSession) -> None:
    body = {"path": "/v1/completions", "headers": {}, "body": {"model": "m", "prompt": [1, 2]}}
    async with client.post(f"{served.url}/explain", json=body) as response:
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
    served: Served, client: aiohttp.ClientSession, path: str, content: bytes
) -> None:
    async with client.post(f"{served.url}/{path}", data=content) as response:
        assert response.status == 400
        assert "error" in await response.json()


async def test_events_are_switched(served: Served, client: aiohttp.ClientSession) -> None:
    async with client.post(f"{served.url}/events", json={"enabled": False}) as response:
        assert await response.json() == {"enabled": False}
    async with client.get(f"{served.url}/events") as response:
        assert await response.json() == {"enabled": False}
