"""How workers that do not say what they serve are asked again."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable
from itertools import chain, repeat
from typing import Any

from extproc.config.reader import parse
from extproc.config.schema import WorkerSettings
from extproc.fleet.asking.asking_times import USUAL, AskingTimes
from extproc.fleet.asking.polling import Client
from extproc.fleet.asking.surroundings import Surroundings
from extproc.fleet.discovery.view import Fleet, Sighting, merged
from extproc.fleet.records.worker import Worker as Record
from extproc.fleet.workers import Workers
from kvstate.fleet import FollowedWorkers
from tests.event_loops import NamingLoop, run_in
from tests.waiting import until

NEVER = 3600.0
CONFIG = "models: [{name: m}, {name: n}]\nworkers: [{endpoint: '127.0.0.1:1', model: m}]"


class Engine:
    """A worker that sends no valid HTTP until it serves something.

    serves: the model that it lists, by how often it was asked before; -1 for any other number.
    asked_at: when it was asked for its models, in seconds.
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
        await until(lambda: len(self.asked_at) >= times, "the worker is asked")


@contextlib.asynccontextmanager
async def engine(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[tuple[Engine, int]]:
    one = Engine()
    server = await asyncio.start_server(one.connected, host, port)
    try:
        yield one, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


def member(name: str, **more: Any) -> Fleet:
    return merged({"file": (Sighting(WorkerSettings(name, learn=True), **more),)})


@contextlib.asynccontextmanager
async def asked(
    name: str,
    chances: Iterable[float] = (),
    times: AskingTimes = USUAL,
    **more: Any,
) -> AsyncIterator[tuple[Workers, Record]]:
    """Follows one worker. chances: the jitter of the first waits; the others have none."""
    chance = chain(chances, repeat(0.5))
    fleet = FollowedWorkers(1, lambda: 0.0)
    one = Workers(
        parse(CONFIG, "c"),
        fleet,
        lambda _: [],
        surroundings=Surroundings(chance=lambda: next(chance), times=times),
    )
    one.engines.identifying.ask = _unasked  # type: ignore[assignment, method-assign]
    await one.replace(member(name, **more))
    await one.start()
    try:
        yield one, one.records[name]
    finally:
        await one.close()


async def _unasked(_: Client, __: Record) -> float:
    """Leaves out the question for the engine, which asks for the models as well."""
    return NEVER


async def until_told(worker: Record) -> None:
    await until(lambda: worker.self_report.model == "m")


async def test_dead_worker_is_asked_ever_more_rarely() -> None:
    times = AskingTimes(model_retry_seconds=(0.02, 0.08))
    async with engine() as (dead, port), asked(f"127.0.0.1:{port}", times=times):
        await dead.until_asked(6)
    waits = [later - at for at, later in zip(dead.asked_at, dead.asked_at[1:], strict=False)]
    for waited, nominal in zip(waits, (0.02, 0.04, 0.08, 0.08, 0.08), strict=False):
        assert waited > 0.9 * nominal


def test_retry_interval_is_at_most_half_a_minute() -> None:
    _, longest = USUAL.model_retry_seconds
    assert longest * 1.5 <= 30.0


async def test_worker_that_answers_again_is_asked_soon() -> None:
    times = AskingTimes(model_retry_seconds=(0.01, NEVER))
    no_wait = [-0.5] * 20
    async with engine() as (starting, port):
        starting.serves = {20: "what is not configured", 21: "m", 22: "m"}
        async with asked(f"127.0.0.1:{port}", no_wait, times=times) as (_, worker):
            await until_told(worker)
        assert len(starting.asked_at) == 22


async def test_worker_that_changes_is_asked_at_once() -> None:
    times = AskingTimes(model_retry_seconds=(NEVER, NEVER))
    async with engine() as (dead, port), asked(f"127.0.0.1:{port}", times=times) as (one, worker):
        await dead.until_asked(1)
        dead.come_up()
        await one.replace(member(worker.name, adapters=((1, "x"),)))
        await until_told(worker)


async def test_worker_that_becomes_ready_is_asked_at_once() -> None:
    times = AskingTimes(model_retry_seconds=(NEVER, NEVER))
    async with engine() as (dead, port):
        name = f"127.0.0.1:{port}"
        async with asked(name, excluded="its pod is not ready", times=times) as (one, worker):
            await dead.until_asked(1)
            dead.come_up()
            await one.replace(member(name))
            await until_told(worker)


def test_worker_that_changes_its_address_is_asked_there_at_once() -> None:
    times = AskingTimes(model_retry_seconds=(NEVER, NEVER), resolve_seconds=0.01)
    loop = NamingLoop()
    loop.addresses = ("127.0.0.1",)

    async def scenario() -> None:
        async with engine() as (dead, port), engine("127.0.0.2", port) as (other, _):
            other.come_up()
            async with asked(f"engine.test:{port}", times=times) as (_, worker):
                await dead.until_asked(1)
                loop.addresses = ("127.0.0.2",)
                await until_told(worker)

    run_in(loop, scenario())
