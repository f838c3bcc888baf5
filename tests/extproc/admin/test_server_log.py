import asyncio
import logging

import aiohttp
import pytest
from aiohttp import web

from extproc.address import Address
from extproc.admin.application import listen
from tests.extproc.admin.serving import Served
from tests.ports import free_port

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
async def test_what_is_no_http_is_one_line_without_what_was_sent(
    served: Served, caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    await _send(served.url, raw)
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "admin: a client sent what is no HTTP request" in record.getMessage()
    assert "(1 so far)" in record.getMessage()
    assert record.exc_info is None
    assert SECRET.decode() not in caplog.text


async def test_many_such_are_told_seldom(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(9):
        await _send(served.url, SECRET + b"\r\n\r\n")
    counts = [one.getMessage().rpartition("(")[2] for one in caplog.records if one.args]
    assert counts == ["1 so far)", "2 so far)", "4 so far)", "8 so far)"]


async def test_an_error_of_a_handler_of_ours_keeps_its_traceback(
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
