import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator
from importlib.resources import files

import aiohttp
import pytest
from aiohttp import web

from extproc.admin import routes
from extproc.admin.application import listen
from extproc.admin.routes import USUAL, StreamLimits, discovery_routes
from extproc.base.address import Address
from extproc.config.reader import parse
from extproc.fleet.discovery.discovery import Discovery
from extproc.fleet.discovery.view import FleetMember, listed
from extproc.fleet.workers import Workers
from kvstate.fleet import FollowedWorkers
from tests.extproc.admin.decisions import decided
from tests.extproc.admin.serving import CONFIG, Served, serving

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PAGE = files("extproc.admin") / "page"


async def test_browsers_get_the_page(served: Served, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{served.url}/", headers=BROWSER) as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert "<title>KVSteer</title>" in await response.text()
        policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy


@pytest.mark.parametrize("name", sorted(one.name for one in PAGE.iterdir()))
async def test_page_files_are_all_served(
    served: Served, client: aiohttp.ClientSession, name: str
) -> None:
    async with client.get(f"{served.url}/page/{name}") as response:
        assert response.status == 200
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert await response.read() == (PAGE / name).read_bytes()


@pytest.mark.parametrize("prompt", ['[1, 2], "user": "\\ud83d"', '[1, 2], "n": NaN'])
async def test_explain_takes_a_body_that_only_engines_read(
    served: Served, client: aiohttp.ClientSession, prompt: str
) -> None:
    odd = f'{{"path": "/v1/completions", "body": {{"prompt": {prompt}}}}}'
    assert (await explained(client, served, odd))["prompt_tokens"] == 2


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapplication.py", "index.html%00"])
async def test_page_route_serves_no_other_file(
    served: Served, client: aiohttp.ClientSession, name: str
) -> None:
    async with client.get(f"{served.url}/page/{name}") as response:
        assert response.status in {400, 404}


def test_page_needs_no_other_site() -> None:
    for one in PAGE.iterdir():
        urls = re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"']*""", one.read_text())
        assert set(urls) <= {"http://www.w3.org/2000/svg"}, one.name


def test_page_scripts_never_read_text_as_html() -> None:
    readers = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(|new Function"
    for one in PAGE.iterdir():
        if one.name.endswith(".js"):
            assert not re.findall(readers, one.read_text()), one.name


BY_HEADER = f"{CONFIG}\npolicy: {{header: X-Policy}}"


async def explained(session: aiohttp.ClientSession, served: Served, raw: str) -> dict[str, object]:
    async with session.post(f"{served.url}/explain", data=raw) as response:
        answer: dict[str, object] = await response.json()
        return answer


async def test_explain_accepts_the_policy_of_a_request(
    client: aiohttp.ClientSession,
) -> None:
    raw = '{"headers": {"x-POLICY": "round_robin"}, "body": {"prompt": [1]}}'
    async with serving(BY_HEADER) as served:
        assert (await explained(client, served, raw))["policy"] == "round_robin"
    async with serving() as served:
        assert (await explained(client, served, raw))["policy"] == "cost"


async def test_explain_keeps_the_body_as_sent(
    served: Served, client: aiohttp.ClientSession
) -> None:
    doubled = '{"path": "/v1/completions", "body": {"model": "m", "prompt": [1], "prompt": [1, 2]}}'
    assert (await explained(client, served, doubled))["prompt_tokens"] == 2
    assert (await explained(client, served, '{"path": "/v1/completions"}'))[
        "reason"
    ] == "bad_request"


async def test_workers_are_complete_while_others_come_and_go(
    client: aiohttp.ClientSession,
) -> None:
    names = [f"127.0.0.1:{port}" for port in range(1, 201)]
    config = "models: [{name: m}]\nworkers:\n" + "".join(f"- {{endpoint: '{n}'}}\n" for n in names)
    async with serving(config) as served:

        async def shown() -> list[str]:
            async with client.get(f"{served.url}/workers") as response:
                return [one["name"] for one in await response.json()]

        assert await shown() == names
        stay = listed(parse(config, "c").workers)[::2]
        some = {one.worker.endpoint: FleetMember(one, "workers") for one in stay}
        answers, _ = await asyncio.gather(shown(), served.workers.replace(some))
        assert set(some) <= set(answers) <= set(names)
        assert await shown() == list(some)


async def test_explain_names_the_fault_of_an_envelope(
    served: Served, client: aiohttp.ClientSession
) -> None:
    shown = await explained(client, served, '{"path": 5}')
    assert "$.path" in str(shown["error"])
    shown = await explained(client, served, "[" * 1_500)
    assert "error" in shown


STREAM = {"Accept": "text/event-stream"}


async def news(response: aiohttp.ClientResponse) -> tuple[int, list[int]]:
    """The next event of a stream: its id, and the decisions in it."""
    number = 0
    async with asyncio.timeout(60):
        async for raw in response.content:
            field, _, value = raw.decode().strip().partition(": ")
            if field == "id":
                number = int(value)
            if field == "data":
                return number, [one["id"] for one in json.loads(value)["decisions"]]
    raise AssertionError("the stream ended")


async def test_decisions_are_listed_since_a_number(
    served: Served, client: aiohttp.ClientSession
) -> None:
    for tokens in (20, 30, 40):
        await served.route(tokens)
    async with client.get(f"{served.url}/decisions?since=1") as response:
        shown = await response.json()
    assert shown["last"] == 3
    assert [one["prompt_tokens"] for one in shown["decisions"]] == [30, 40]


async def test_decision_opens_into_its_explanation(
    served: Served, client: aiohttp.ClientSession
) -> None:
    await served.route(20)
    async with client.get(f"{served.url}/decisions/1") as response:
        shown = await response.json()
    assert (shown["id"], shown["at"], shown["pick"]) == (1, 5.0, ["127.0.0.1:1"])
    assert shown["candidates"][0]["cost_terms"]["uncached_tokens"] == 20


async def test_decision_that_is_not_kept_is_not_found(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{served.url}/decisions/9") as response:
        assert (response.status, "error" in await response.json()) == (404, True)


@pytest.mark.parametrize(
    "path", ["decisions?since=-1", "decisions?since=x", "decisions/" + "9" * 99]
)
async def test_number_that_is_malformed_is_answered_400(
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


async def test_decision_stream_continues_where_it_was_interrupted(
    served: Served, client: aiohttp.ClientSession
) -> None:
    for _ in range(3):
        await served.route(20)
    headers = {**STREAM, "Last-Event-ID": "2"}
    async with client.get(f"{served.url}/decisions", headers=headers) as response:
        assert await news(response) == (3, [3])


async def test_decision_streams_are_bounded(served: Served) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        url = f"{served.url}/decisions"
        open_now = [await client.get(url, headers=STREAM) for _ in range(USUAL.readers)]
        async with client.get(url, headers=STREAM) as refused:
            assert refused.status == 503
        for response in open_now:
            response.close()


async def test_decision_stream_that_closes_makes_room(
    served: Served, client: aiohttp.ClientSession
) -> None:
    for _ in range(2 * USUAL.readers):
        await served.route(20)
        while True:  # whoever left is noticed at the next write
            async with client.get(f"{served.url}/decisions", headers=STREAM) as response:
                if response.status == 200:
                    await news(response)
                    break


async def test_decision_stream_ends_with_the_router(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{served.url}/decisions", headers=STREAM) as response:
        served.observations.is_closed = True
        async with asyncio.timeout(60):
            assert b"data:" not in await response.read()


async def test_decision_stream_that_is_not_read_is_dropped() -> None:
    limits = StreamLimits(readers=1, write_seconds=0.1, look_seconds=0.0)
    async with serving(streams=limits) as served, aiohttp.ClientSession() as client:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.write(
            b"GET /decisions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"
        )
        assert await reader.read(1) == b"H"
        async with asyncio.timeout(100):
            while await is_full(served, client):
                for _ in range(50):  # added directly: not all requests are kept
                    served.observations.recent.add(decided(), 5.0)
        writer.close()


async def is_full(served: Served, client: aiohttp.ClientSession) -> bool:
    async with client.get(f"{served.url}/decisions", headers=STREAM) as response:
        return response.status == 503


async def test_prefixes_of_the_last_prompts_are_listed(
    served: Served, client: aiohttp.ClientSession
) -> None:
    for tokens in (20, 40):
        await served.route(tokens)
    async with client.get(f"{served.url}/prefixes") as response:
        shown = await response.json()
    assert shown["prompts"] == 2
    assert [(one["tokens"], one["requests"]) for one in shown["prefixes"]] == [(20, 2), (40, 1)]
    assert shown["prefixes"][0]["held_by"] == 0


async def test_history_covers_all_or_the_named_workers(
    served: Served, client: aiohttp.ClientSession
) -> None:
    served.observations.sample(5.0, {"a": (1, 2), "b": (0, 3)})
    async with client.get(f"{served.url}/history") as response:
        shown = await response.json()
    assert shown["step_seconds"] == 5.0
    assert (shown["at"], set(shown["workers"])) == ([5.0], {"a", "b"})
    assert shown["fleet"]["blocks"] == [5]
    async with client.get(f"{served.url}/history?worker=b&worker=gone") as response:
        shown = await response.json()
    assert {name: one["blocks"] for name, one in shown["workers"].items()} == {
        "b": [3],
        "gone": [None],
    }


async def test_history_of_an_unknown_worker_is_not_found(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{served.url}/history?worker=zzz") as response:
        assert (response.status, await response.json()) == (
            404,
            {"error": "unknown worker"},
        )
    async with client.get(f"{served.url}/history?worker=127.0.0.1:1") as response:
        assert response.status == 200  # a known worker of which nothing is recorded yet


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """An admin server of one worker."""
    config = parse('models: [{name: a}]\nworkers: [{endpoint: "127.0.0.1:1"}]', "c")
    workers = Workers(config, FollowedWorkers(1, lambda: 0.0), lambda _: [])
    discovery = Discovery(listed(config.workers), [])
    application = web.Application()
    application.add_routes(discovery_routes(workers, discovery))
    runner = await listen(application, Address("127.0.0.1", 0), "admin")
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as one:
        yield one


async def test_discovery_shows_every_source(url: str, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{url}/discovery") as response:
        (source,) = await response.json()
    assert (source["source"], source["workers"], source["fault"]) == ("workers", 1, "")


async def test_draining_stops_and_resumes_requests_to_a_worker(
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
async def test_draining_refuses_malformed_bodies(
    url: str, session: aiohttp.ClientSession, body: object, status: int
) -> None:
    async with session.post(f"{url}/draining", json=body) as response:
        assert response.status == status
        assert "error" in await response.json()


async def test_listed_encodes_a_long_list_in_turns() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(others())
    made = await routes.listed(
        {"at": number, "turn": turns} for number in range(10 * routes.AT_ONCE + 1)
    )
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    shown = json.loads(bytes(made))
    assert [one["at"] for one in shown] == list(range(10 * routes.AT_ONCE + 1))
    in_one_go = [len(list(each)) for _, each in itertools.groupby(shown, lambda one: one["turn"])]
    assert max(in_one_go) == routes.AT_ONCE


async def test_listed_encodes_an_empty_list() -> None:
    assert bytes(await routes.listed([])) == b"[]"


async def test_steering_is_shown_and_changed(
    session: aiohttp.ClientSession,
) -> None:
    async with serving() as served:
        await served.route(100)
        async with session.get(f"{served.url}/steering") as response:
            assert await response.json() == {
                "percent": 100.0,
                "header": None,
                "steered": {"delivered": 0, "elsewhere": 0, "unknown": 1},
                "unsteered": 0,
                "fault": "",
            }
        async with session.post(f"{served.url}/steering", json={"percent": 12.5}) as response:
            assert (await response.json())["percent"] == 12.5
        assert served.router.steering.percent == 12.5


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "{}",
        '{"percent": true}',
        '{"percent": "5"}',
        '{"percent": -1}',
        '{"percent": 100.1}',
        '{"percent": NaN}',
        '{"percent": null}',
        "no json",
    ],
)
async def test_steering_refuses_malformed_shares(session: aiohttp.ClientSession, body: str) -> None:
    async with serving() as served:
        async with session.post(f"{served.url}/steering", data=body) as response:
            assert response.status == 400
            assert "error" in await response.json()
        assert served.router.steering.percent == 100.0


async def test_steering_stays_at_100_where_all_must_be_steered(
    session: aiohttp.ClientSession,
) -> None:
    async with serving(steers_all=True) as served:
        for percent, status in ((99, 400), (100, 200)):
            body = {"percent": percent}
            async with session.post(f"{served.url}/steering", json=body) as response:
                assert response.status == status
