import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version

import aiohttp
import pytest
from aiohttp import web

from extproc.admin import documents
from extproc.admin.application import AT_ONCE, Fill, FleetSampler, listen, metrics_application
from extproc.admin.observations import Observations
from extproc.admin.routes import documentation_in
from extproc.base.address import Address
from extproc.base.errors import StartError
from extproc.observing.faults import Faults
from extproc.observing.metrics import Metrics
from tests.extproc.admin.serving import Served, serving
from tests.extproc.nobody import Nobody
from tests.ports import free_port


async def test_root_names_version_and_memory(served: Served, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{served.url}/") as response:
        about = await response.json()
    assert about["version"] == version("kvsteer")
    assert "documentation" in about
    assert about["index_bytes"] >= 0


def test_documentation_in_returns_the_address_of_the_package() -> None:
    links = ["Source, https://git.example/k", "Documentation, https://git.example/k/docs"]
    assert documentation_in(links) == "https://git.example/k/docs"
    assert documentation_in(["Documentation, javascript:alert(1)"]) is None


async def test_documentation_is_served_where_its_files_are(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{served.url}/") as response:
        assert (await response.json())["documentation"] == documents.PATH
    async with client.get(f"{served.url}/docs/metrics.md") as response:
        assert 'id="reasons-of-a-decision"' in await response.text()
        assert "script-src 'self'" in response.headers["Content-Security-Policy"]
    for name in ("none.md", "..%2fREADME.md"):
        async with client.get(f"{served.url}/docs/{name}") as response:
            assert response.status == 404


async def test_workers_are_a_list(served: Served, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{served.url}/workers") as response:
        assert [worker["endpoint"] for worker in await response.json()] == ["127.0.0.1:1"]


async def test_models_say_which_are_hung(served: Served, client: aiohttp.ClientSession) -> None:
    for hung in ((), ("m",)):
        served.router.hung = frozenset(hung)
        async with client.get(f"{served.url}/models") as response:
            assert [(one["model"], one["hung"]) for one in await response.json()] == [
                ("m", bool(hung))
            ]


async def test_explain_answers_for_a_request(served: Served, client: aiohttp.ClientSession) -> None:
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
async def test_malformed_body_is_answered_400(
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


@pytest.mark.parametrize(
    ("hindrance", "answer"),
    [("", (200, "ready\nnote: x: y\n")), ("stopping", (503, "stopping\nnote: x: y\n"))],
)
async def test_scrapers_read_metrics_health_and_readiness(
    client: aiohttp.ClientSession, hindrance: str, answer: tuple[int, str]
) -> None:
    place = Address("127.0.0.1", free_port())
    runner = await listen(
        metrics_application(Metrics(Nobody()), lambda: hindrance, Faults(), ["x: y"]),
        place,
        "metrics",
    )
    async with client.get(f"http://{place}/readyz") as response:
        assert (response.status, await response.text()) == answer
    async with client.get(f"http://{place}/healthz") as response:
        assert response.status == 200
    async with client.get(f"http://{place}/metrics") as response:
        assert "kvsteer_open_streams 0.0" in await response.text()
    await runner.cleanup()


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://[::1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_cross_site_requests_are_refused(
    served: Served, client: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    async with client.get(f"{served.url}/workers", headers=headers) as response:
        assert response.status == 403
        assert re.search("served here|other origins|other sites", str(await response.json()))


@pytest.mark.parametrize("site", ["none", "same-origin"])
async def test_same_site_and_typed_requests_are_served(
    served: Served, client: aiohttp.ClientSession, site: str
) -> None:
    async with client.get(f"{served.url}/workers", headers={"Sec-Fetch-Site": site}) as response:
        assert response.status == 200


@pytest.mark.parametrize("host", ["localhost:1234", "[::1]:9", "127.0.0.1"])
async def test_loopback_names_are_served(
    served: Served, client: aiohttp.ClientSession, host: str
) -> None:
    headers = {"Host": host, "Origin": f"http://{host}"}
    async with client.get(f"{served.url}/workers", headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("GET", "nowhere", 404, "unknown path"),
        ("GET", "page/nothing.js", 404, "unknown path"),
        ("DELETE", "draining", 405, "DELETE is not allowed here, only GET, HEAD, POST"),
        ("GET", "decisions/9", 404, "this decision is no longer kept"),
    ],
)
async def test_errors_are_json(
    served: Served, client: aiohttp.ClientSession, method: str, path: str, status: int, reason: str
) -> None:
    async with client.request(method, f"{served.url}/{path}") as response:
        assert (response.status, await response.json()) == (status, {"error": reason})


async def test_oversized_body_is_refused_as_json(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.post(f"{served.url}/explain", data=b" " * 2001) as response:
        assert response.status == 413
        assert "2000" in (await response.json())["error"]


SECRET = b"a-prompt-of-somebody"


async def _send(url: str, raw: bytes) -> bytes:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "raw",
    [
        SECRET + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + SECRET + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nx: \x00" + SECRET + b"\r\n\r\n",
        b"POST /explain HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        + SECRET
        + b"\r\n",
    ],
)
async def test_invalid_http_is_logged_in_one_line_without_its_content(
    served: Served, caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    await _send(served.url, raw)
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "admin: a client sent an invalid HTTP request" in record.getMessage()
    assert "(1 so far)" in record.getMessage()
    assert record.exc_info is None
    assert SECRET.decode() not in caplog.text


async def test_invalid_http_is_logged_ever_more_rarely(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(9):
        await _send(served.url, SECRET + b"\r\n\r\n")
    counts = [one.getMessage().rpartition("(")[2] for one in caplog.records if one.args]
    assert counts == ["1 so far)", "2 so far)", "4 so far)", "8 so far)"]


async def test_handler_fault_keeps_its_traceback(
    client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: web.Request) -> web.Response:
        raise ZeroDivisionError

    application = web.Application()
    application.add_routes([web.get("/", fail)])
    place = Address("127.0.0.1", free_port())
    runner = await listen(application, place, "metrics")
    try:
        async with client.get(f"http://{place}/") as response:
            assert response.status == 500
    finally:
        await runner.cleanup()
    assert "metrics: Error handling request from 127.0.0.1" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def fills(count: int) -> Iterator[Fill]:
    return ((f"w{number}", 1, 2) for number in range(count))


async def test_sampling_fills_the_history_until_it_is_closed() -> None:
    observations, sampled = Observations(lambda: 0.0), asyncio.Semaphore(0)

    def clock() -> float:
        sampled.release()
        return 5.0

    sampling = FleetSampler(observations, lambda: fills(AT_ONCE + 1), clock, step_seconds=0.001)
    sampling.start()
    async with asyncio.timeout(60):
        for _ in range(3):
            await sampled.acquire()
    await sampling.close()
    assert len(observations.history.names()) == AT_ONCE + 1
    assert observations.is_closed


async def test_sampling_continues_after_a_failed_sample(caplog: pytest.LogCaptureFixture) -> None:
    observations, again = Observations(lambda: 0.0), asyncio.Event()

    def found() -> Iterator[Fill]:
        if "could not be sampled" not in caplog.text:
            raise KeyError("gone meanwhile")
        again.set()
        return fills(1)

    sampling = FleetSampler(observations, found, lambda: 5.0, step_seconds=0.001)
    sampling.start()
    async with asyncio.timeout(60):
        await again.wait()
    await sampling.close()


async def test_sampling_that_never_started_can_be_closed() -> None:
    await FleetSampler(Observations(lambda: 0.0), lambda: fills(0), lambda: 0.0).close()


async def test_start_error_names_a_taken_port_in_one_line(served: Served) -> None:
    port = int(served.url.rpartition(":")[2])
    application = metrics_application(Metrics(Nobody()), lambda: "", Faults())
    with pytest.raises(
        StartError,
        match=rf"metrics\.listen: cannot listen on 127\.0\.0\.1:{port}: Address already in use$",
    ):
        await listen(application, Address("127.0.0.1", port), "metrics")


@pytest.mark.parametrize("path", ["events", "draining", "steering"])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_small_requests_are_limited_to_4_kib(
    client: aiohttp.ClientSession, path: str, *, is_chunked: bool
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 100

    content = chunks() if is_chunked else b" " * 5_000
    async with (
        serving(max_body_bytes=2_000_000) as served,
        client.post(f"{served.url}/{path}", data=content) as response,
    ):
        assert response.status == 413
        assert "error" in await response.json()


COSTLY = [
    b'{"headers": {"x": [' + b"[]," * 100_000 + b"[]]}}",
    b'{"headers": {' + b'"a":"",' * 140_000 + b'"b":""}}',
    b'{"body": {"x": [' + b"[]," * 100_000 + b"[]]}}",
    b'{"other": [' + b"{}," * 100_000 + b"{}]}",
    b'{"headers": {"x": ["a list"]}}',
]


@pytest.mark.parametrize("content", COSTLY, ids=range(len(COSTLY)))
async def test_costly_explain_request_is_refused_undecoded(
    client: aiohttp.ClientSession, content: bytes
) -> None:
    async with (
        serving(max_body_bytes=2_000_000) as served,
        client.post(f"{served.url}/explain", data=content) as response,
    ):
        assert response.status == 400
        assert re.search("too many|want", (await response.json())["error"])
