"""What clients do and what Envoy may suffer: no request fares worse with the router."""

import asyncio
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest

from tests.system.clients.http2_client import connected
from tests.system.conftest import Row
from tests.system.load import LOOPS, Load, Outcome, body, client, closed_loop, counted, post
from tests.system.stage import BUFFER_LIMIT_BYTES, MAX_BODY_BYTES, Stage
from tests.system.steering import Probes
from tests.system.system import CHAT
from tests.waiting import until

MIB = 1024 * 1024
TRAILERS = [("x-checksum", "abc")]
STREAMS = 1_500
# Streams that start at the same time: more would test how fast the machine is.
BATCH = 100
CHUNK_BYTES = 65_536

JSON = {"content-type": "application/json"}


def padded(size: int) -> bytes:
    """A short prompt in a long body."""
    text = json.dumps(body() | {"padding": "x" * size})
    return text.encode()


async def answer(session: aiohttp.ClientSession, url: str, size: int, *, chunked: bool) -> str:
    """Sends a request of this size, chunked or with its length; returns the status or the error."""
    data = padded(size)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(data), CHUNK_BYTES):
            yield data[at : at + CHUNK_BYTES]

    sent: Any = pieces() if chunked else io.BytesIO(data)
    try:
        async with session.post(f"{url}{CHAT}", data=sent, headers=JSON) as response:
            await response.read()
            return str(response.status)
    except aiohttp.ClientError as error:
        return type(error).__name__


@pytest.mark.slow
@pytest.mark.parametrize("router", ["up", "down"])
async def test_large_bodies_fare_as_without_a_router(
    stage: Stage, table: list[Row], router: str
) -> None:
    if router == "down":
        stage.routers[0].kill()
    sizes = {
        "5 MB body": 5 * MIB,
        "body over our limit": MAX_BODY_BYTES + MIB,
        "body over Envoy's": BUFFER_LIMIT_BYTES + MIB,
    }
    async with client() as session:
        for name, size in sizes.items():
            for chunked in (False, True):
                ours = [await answer(session, stage.url, size, chunked=chunked) for _ in "123"]
                plain = await answer(session, stage.plain_url, size, chunked=chunked)
                # Envoy may refuse what it cannot buffer, as documented: no pick could help.
                held = size > BUFFER_LIMIT_BYTES and router == "up"
                lost = sum(one not in ((plain, "413") if held else (plain,)) for one in ours)
                what = f"{name}, {'chunked' if chunked else 'length told'}, router {router}"
                note = f"answered {' '.join(ours)}, without us {plain}"
                table.append(Row(what, "-", len(ours), lost, 0, note=note))
                assert table[-1].lost_by_us == 0


@pytest.mark.slow
@pytest.mark.parametrize("trailers", [(), TRAILERS])
async def test_http2_clients_are_answered_while_the_router_is_killed(
    stage: Stage, table: list[Row], trailers: list[tuple[str, str]]
) -> None:
    authority = stage.url.removeprefix("http://")
    async with (
        connected(stage.url) as http2,
        closed_loop(lambda: http2.post(authority, body(), trailers)) as load,
    ):
        await load.goes_on(40)
        stage.routers[0].kill()
        await load.goes_on(40)
        stage.routers[0].start()
        await asyncio.to_thread(stage.routers[0].wait)
        await load.goes_on(40)
    name = f"HTTP/2 clients{', trailers' if trailers else ''}; router killed"
    table.append(_row(name, stage, "closed", load))
    assert table[-1].lost_by_us == 0


@pytest.mark.slow
async def test_http1_requests_with_trailers_are_answered(stage: Stage, table: list[Row]) -> None:
    async with closed_loop(lambda: _with_http1_trailers(stage.url)) as load:
        await load.goes_on(100)
    table.append(_row("HTTP/1.1 clients, trailers", stage, "closed", load))
    assert table[-1].lost_by_us == 0


@pytest.mark.slow
async def test_streams_in_flight_survive_a_killed_router(stage: Stage, table: list[Row]) -> None:
    """All of them wait for stopped workers, so that all are under way at the same time."""
    prompt = body() | {"stream": True}
    async with client() as session:
        for worker in stage.workers:
            worker.stop()
        streams: list[asyncio.Task[Outcome]] = []
        while len(streams) < STREAMS:
            streams += [asyncio.create_task(post(session, stage.url, prompt)) for _ in range(BATCH)]
            await until(partial(_are_sent, session, stage, len(streams)), "sent on by Envoy")
        known = await _in_flight(session, stage)
        stage.routers[0].kill()
        for worker in stage.workers:
            worker.go_on()
        outcomes = await asyncio.gather(*streams)
    # Those that waited longer than message_timeout have gone on without the router.
    note = f"{known:,} of them placed by the router"
    name = f"{STREAMS:,} streams at once, router killed"
    table.append(Row(name, "-", len(outcomes), *counted(outcomes), note=note))
    assert table[-1].lost_by_us == 0


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["closed", "open"])
async def test_restarted_envoy_loses_no_later_request_and_steers_again(
    stage: Stage, table: list[Row], loop: str
) -> None:
    """What Envoy itself loses is lost without a router, too: only what comes later counts."""
    listens = asyncio.Event()
    listens.set()
    async with client() as session:
        probes = Probes(session, stage, stage.url)
        await probes.prepare()
        async with LOOPS[loop](lambda: _patiently(session, stage.url, listens)) as load:
            await load.goes_on(30)
            listens.clear()
            await asyncio.to_thread(stage.envoy.kill)
            stage.envoy.start()
            await asyncio.to_thread(stage.envoy.wait)
            listens.set()
            back = time.monotonic()
            steers = await probes.steered_after(back)
            await load.goes_on(60)
    after = [one for one in load.outcomes if one.started > back]
    row = Row("Envoy killed, started again", loop, len(after), *counted(after))
    gone = sum(not one.is_answered for one in load.outcomes if one.started <= back)
    note = f"and {gone} while there was no Envoy"
    table.append(row._replace(steers_ms=1e3 * steers, note=note))
    assert table[-1].lost_by_us == 0


async def _patiently(session: aiohttp.ClientSession, url: str, listens: asyncio.Event) -> Outcome:
    """Sends a request; if it gets no answer, waits until Envoy listens instead of sending more."""
    outcome = await post(session, url, body())
    if not outcome.status:
        await listens.wait()
    return outcome


async def _with_http1_trailers(url: str) -> Outcome:
    """A chunked request that ends with a trailer, which no client library sends."""
    started = time.monotonic()
    data = json.dumps(body()).encode()
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    head += "connection: close\r\ntrailer: x-checksum\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode() + f"{len(data):x}\r\n".encode() + data)
    writer.write(b"\r\n0\r\nx-checksum: abc\r\n\r\n")
    answer = (await reader.read()).decode()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    status = int(answer.split(" ", 2)[1]) if answer else 0
    return Outcome(status, "", "" if status == 200 else answer, started, time.monotonic())


async def _in_flight(session: aiohttp.ClientSession, stage: Stage) -> int:
    async with session.get(f"{stage.admin}/workers") as response:
        return sum(int(worker["in_flight"]) for worker in await response.json())


async def _are_sent(session: aiohttp.ClientSession, stage: Stage, count: int) -> bool:
    """Whether this many streams wait for a worker."""
    name = "cluster.workers.upstream_rq_active"
    async with session.get(f"{stage.envoy_admin}/stats?filter=^{name}$") as response:
        return (await response.text()).strip() == f"{name}: {count}"


def _row(failure: str, stage: Stage, loop: str, load: Load) -> Row:
    return Row(failure, loop, len(load.outcomes), *counted(load.outcomes))
