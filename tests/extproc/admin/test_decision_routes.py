import asyncio
import json

import aiohttp
import pytest

from extproc.admin.routes import MAX_READERS
from tests.extproc.admin.decisions import decided
from tests.extproc.admin.serving import Served

STREAM = {"Accept": "text/event-stream"}


async def news(response: aiohttp.ClientResponse) -> tuple[int, list[int]]:
    """The next event of a stream: its id, and the decisions in it."""
    number = 0
    async with asyncio.timeout(20):
        async for raw in response.content:
            field, _, value = raw.decode().strip().partition(": ")
            if field == "id":
                number = int(value)
            if field == "data":
                return number, [one["id"] for one in json.loads(value)["decisions"]]
    raise AssertionError("the stream ended")


async def test_decisions_are_listed_from_where_one_was(
    served: Served, client: aiohttp.ClientSession
) -> None:
    for tokens in (20, 30, 40):
        await served.route(tokens)
    async with client.get(f"{served.url}/decisions?since=1") as response:
        told = await response.json()
    assert told["last"] == 3
    assert [one["prompt_tokens"] for one in told["decisions"]] == [30, 40]


async def test_a_decision_opens_into_its_explanation(
    served: Served, client: aiohttp.ClientSession
) -> None:
    await served.route(20)
    async with client.get(f"{served.url}/decisions/1") as response:
        told = await response.json()
    assert (told["id"], told["at"], told["pick"]) == (1, 5.0, ["127.0.0.1:1"])
    assert told["candidates"][0]["cost_terms"]["uncached_tokens"] == 20


async def test_a_decision_that_is_not_kept_is_not_found(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{served.url}/decisions/9") as response:
        assert (response.status, "error" in await response.json()) == (404, True)


@pytest.mark.parametrize(
    "path", ["decisions?since=-1", "decisions?since=x", "decisions/" + "9" * 99]
)
async def test_what_is_no_number_is_answered_400(
    served: Served, client: aiohttp.ClientSession, path: str
) -> None:
    async with client.get(f"{served.url}/{path}") as response:
        assert response.status == 400


async def test_decisions_are_streamed_as_they_are_made(
    served: Served, client: aiohttp.ClientSession
) -> None:
    await served.route(20)
    async with client.get(f"{served.url}/decisions", headers=STREAM) as response:
        assert response.content_type == "text/event-stream"
        assert await news(response) == (1, [1])
        await served.route(30)
        assert await news(response) == (2, [2])


async def test_a_stream_goes_on_where_it_was_cut(
    served: Served, client: aiohttp.ClientSession
) -> None:
    for _ in range(3):
        await served.route(20)
    headers = {**STREAM, "Last-Event-ID": "2"}
    async with client.get(f"{served.url}/decisions", headers=headers) as response:
        assert await news(response) == (3, [3])


async def test_there_is_an_end_to_readers(served: Served) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        url = f"{served.url}/decisions"
        open_now = [await client.get(url, headers=STREAM) for _ in range(MAX_READERS)]
        async with client.get(url, headers=STREAM) as refused:
            assert refused.status == 503
        for response in open_now:
            response.close()


async def test_readers_that_leave_make_room(served: Served, client: aiohttp.ClientSession) -> None:
    for _ in range(2 * MAX_READERS):
        await served.route(20)
        while True:  # whoever left is noticed at the next write
            async with client.get(f"{served.url}/decisions", headers=STREAM) as response:
                if response.status == 200:
                    await news(response)
                    break


async def test_a_stream_ends_with_the_router(served: Served, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{served.url}/decisions", headers=STREAM) as response:
        served.observed.is_closed = True
        async with asyncio.timeout(20):
            assert b"data:" not in await response.read()


async def test_a_reader_that_does_not_read_is_dropped(
    served: Served, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MAX_READERS", 1), ("WRITE_SECONDS", 0.1), ("LOOK_SECONDS", 0.0)):
        monkeypatch.setattr(f"extproc.admin.routes.{name}", value)
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    writer.write(b"GET /decisions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n")
    assert await reader.read(1) == b"H"
    async with asyncio.timeout(100):
        while await is_full(served, client):
            for _ in range(50):  # of requests, not all are kept
                served.observed.recent.add(decided(), 5.0)
    writer.close()


async def is_full(served: Served, client: aiohttp.ClientSession) -> bool:
    async with client.get(f"{served.url}/decisions", headers=STREAM) as response:
        return response.status == 503
