"""How workers that do not tell what they serve are asked again."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable
from itertools import chain, repeat
from typing import Any

import pytest

from extproc.config import Model, Worker
from extproc.config.reader import parse
from extproc.discovery.view import STATIC, Fleet, Found, merged
from extproc.workers import learning, resolving
from extproc.workers.learning import Learning
from extproc.workers.roster import Roster

NEVER = 3600.0
CONFIG = "models: [{name: m}, {name: n}]\nworkers: [{endpoint: '127.0.0.1:1', model: m}]"


class Engine:
    """A worker that sends what is no HTTP, until it serves something.

    serves: by how often it was asked before, the models that it then lists. asked_at: when a
    connection came, in seconds.
    """

    def __init__(self) -> None:
        self.serves: dict[int, str] = {}
        self.asked_at: list[float] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        model = self.serves.get(len(self.asked_at), self.serves.get(-1))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
            if path == b"/v1/models":
                self.asked_at.append(time.monotonic())
            body = json.dumps({"data": [{"id": model}]}).encode()
            head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            writer.write(b"nothing\r\n\r\n" if model is None else head % len(body) + body)
            await writer.drain()
        writer.close()

    def come_up(self) -> None:
        self.serves[-1] = "m"

    async def until_asked(self, times: int) -> None:
        async with asyncio.timeout(20):
            while len(self.asked_at) < times:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def engine(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[tuple[Engine, int]]:
    one = Engine()
    server = await asyncio.start_server(one.connected, host, port)
    try:
        yield one, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


@contextlib.asynccontextmanager
async def asked(
    port: int, chances: Iterable[float] = ()
) -> AsyncIterator[tuple[Learning, asyncio.Event, str]]:
    """chances: those of the first waits; the others have no jitter."""
    told, chance = asyncio.Event(), chain(chances, repeat(0.5))
    one = Learning([Model("m")], lambda _: told.set(), lambda: next(chance))
    name = f"127.0.0.1:{port}"
    await one.ask({name: Worker(name, learn=True)})
    try:
        yield one, told, name
    finally:
        await one.close()


async def until_known(one: Learning, name: str) -> None:
    while one.of(name).model is None:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.002)


def found(name: str, **more: Any) -> Fleet:
    return merged({STATIC: (Found(Worker(name, learn=True), **more),)})


@contextlib.asynccontextmanager
async def roster(name: str, **more: Any) -> AsyncIterator[tuple[Roster, asyncio.Event]]:
    told = asyncio.Event()
    one = Roster(parse(CONFIG, "c"), lambda *_: None, told.set)
    one.replace(found(name, **more))
    await one.start()
    try:
        yield one, told
    finally:
        await one.close()


async def test_a_dead_worker_is_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "RETRY_SECONDS", (0.02, 0.08))
    async with engine() as (dead, port), asked(port):
        await dead.until_asked(6)
    waits = [later - at for at, later in zip(dead.asked_at, dead.asked_at[1:], strict=False)]
    for waited, nominal in zip(waits, (0.02, 0.04, 0.08, 0.08, 0.08), strict=False):
        assert waited > 0.9 * nominal


def test_no_worker_is_left_unasked_for_longer_than_half_a_minute() -> None:
    _, longest = learning.RETRY_SECONDS
    assert longest * 1.5 <= 30.0


async def test_a_worker_that_answers_again_is_asked_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "RETRY_SECONDS", (0.01, NEVER))
    no_wait = [-0.5] * 20
    async with engine() as (starting, port):
        starting.serves = {20: "what is not configured", 21: "m", 22: "m"}
        async with asked(port, no_wait) as (one, told, name), asyncio.timeout(20):
            await told.wait()
            await until_known(one, name)
        assert len(starting.asked_at) == 22


async def test_a_worker_that_is_not_as_it_was_is_asked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learning, "RETRY_SECONDS", (NEVER, NEVER))
    async with engine() as (dead, port), asked(port) as (one, told, name):
        await dead.until_asked(1)
        dead.come_up()
        one.ask_now(name)
        one.ask_now("of no worker")
        async with asyncio.timeout(20):
            await told.wait()
        assert one.of(name).model == "m"


async def test_a_worker_that_became_ready_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "RETRY_SECONDS", (NEVER, NEVER))
    async with engine() as (dead, port):
        name = f"127.0.0.1:{port}"
        async with roster(name, excluded="its pod is not ready") as (one, told):
            await dead.until_asked(1)
            dead.come_up()
            one.replace(found(name))
            async with asyncio.timeout(20):
                await told.wait()
            assert one.model_of(name) == "m"


async def test_a_worker_that_has_another_address_is_asked_there_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learning, "RETRY_SECONDS", (NEVER, NEVER))
    monkeypatch.setattr(resolving, "RESOLVE_INTERVAL_SECONDS", 0.01)
    hosts = ["127.0.0.1"]

    async def lookup(_: object, port: int, **__: object) -> list[Any]:
        return [(2, 1, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    async with engine() as (dead, port), engine("127.0.0.2", port) as (other, _):
        other.come_up()
        async with roster(f"engine.test:{port}") as (one, told):
            await dead.until_asked(1)
            hosts[:] = ["127.0.0.2"]
            async with asyncio.timeout(20):
                await told.wait()
            assert one.model_of(f"engine.test:{port}") == "m"
