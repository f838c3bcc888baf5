import asyncio
import contextlib
import socket
import time
from array import array
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from aiohttp import web

from extproc.config import Config, Model
from extproc.picking.placing import FAILURES_UNTIL_DEAD, Placing
from extproc.workers.asking import FAILURES_UNTIL_UNHEALTHY, Doubts, HealthProbe
from kvstate.overlap import Prompt
from tests.ports import free_port

DEADLINE_SECONDS = 20


class Engine:
    """An HTTP server with /health, on a port of its own."""

    def __init__(self) -> None:
        self.status = 200
        self.asked = 0
        self.endpoint = ""

    async def health(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(status=self.status)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    one = Engine()
    application = web.Application()
    application.router.add_get("/health", one.health)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    one.endpoint = f"{host}:{port}"
    yield one
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as one:
        yield one


def placing() -> Placing:
    return Placing(Config(models=(Model("m"),)), secret=1)


def probe(books: Placing, *endpoints: str, interval_seconds: float = 0.0) -> HealthProbe:
    places = [("a", endpoint) for endpoint in endpoints]
    return HealthProbe(books, lambda: places, interval_seconds, lambda: 0.5, time.monotonic)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("status", [503, 404, 302])
async def test_a_worker_that_is_not_well_is_left_out_until_it_is(
    engine: Engine, session: aiohttp.ClientSession, status: int
) -> None:
    books = placing()
    asking = probe(books)
    engine.status = status
    for number in range(FAILURES_UNTIL_UNHEALTHY):
        assert not books.unhealthy, number
        await asking.ask(session, ("a", engine.endpoint))
    assert books.unhealthy == {engine.endpoint: "fails its health probe"}
    engine.status = 200
    await asking.ask(session, ("a", engine.endpoint))
    assert books.unhealthy == {}


async def test_failures_count_in_a_row(engine: Engine, session: aiohttp.ClientSession) -> None:
    books = placing()
    asking = probe(books)
    for status in (503, 200, 503, 200):
        engine.status = status
        await asking.ask(session, ("a", engine.endpoint))
    assert books.unhealthy == {}


async def test_what_was_sent_to_a_worker_that_cannot_be_reached_is_forgotten(
    session: aiohttp.ClientSession,
) -> None:
    books = placing()
    marks = books.sent.marks(Prompt("m", array("I", range(100))))
    books.sent.record("a", marks, time.monotonic())
    asking = probe(books)
    for _ in range(FAILURES_UNTIL_UNHEALTHY):
        await asking.ask(session, ("a", "127.0.0.1:1"))
    assert not books.sent.expected(marks, time.monotonic())


async def test_a_probe_does_not_undo_what_others_know(
    engine: Engine, session: aiohttp.ClientSession
) -> None:
    books = placing()
    books.unfit[engine.endpoint] = "does not answer"
    books.draining.add(engine.endpoint)
    await probe(books).ask(session, ("a", engine.endpoint))
    assert (len(books.unfit), len(books.draining)) == (1, 1)


async def test_workers_are_asked_again_and_again_and_those_that_went_forgotten(
    engine: Engine,
) -> None:
    books = placing()
    books.unhealthy["gone:1"] = "fails its health probe"
    asking = probe(books, engine.endpoint, interval_seconds=0.05)
    await asking.start()
    await until(lambda: engine.asked >= 3)
    assert books.unhealthy == {}
    engine.status = 500
    await until(lambda: engine.endpoint in books.unhealthy)
    await asking.close()


async def test_by_default_no_worker_is_asked(engine: Engine) -> None:
    asking = probe(placing(), engine.endpoint)
    await asking.start()
    await asking.close()
    assert engine.asked == 0


async def test_the_next_worker_at_an_address_that_failed_is_left_out_too(
    engine: Engine, session: aiohttp.ClientSession
) -> None:
    books = placing()
    asking = probe(books)
    engine.status = 503
    for _ in range(FAILURES_UNTIL_UNHEALTHY + 1):
        await asking.ask(session, ("a", engine.endpoint))
    books.remove("a", engine.endpoint, time.monotonic())
    await asking.ask(session, ("a", engine.endpoint))
    assert books.unhealthy == {engine.endpoint: "fails its health probe"}


async def test_a_death_that_the_scrapes_told_is_not_told_again(
    session: aiohttp.ClientSession, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvsteer")
    books = placing()
    books.unfit[engine.endpoint] = "does not answer on its endpoint"
    asking = probe(books)
    for status in (503, 503, 200):
        engine.status = status
        await asking.ask(session, ("a", engine.endpoint))
    assert caplog.messages == []


class Life:
    """What the feed of a worker shows."""

    def __init__(self) -> None:
        self.is_cut = False
        self.publishes = False
        self.looks = 0

    def sign(self, _: str) -> tuple[bool, int]:
        self.looks += 1
        return self.is_cut, self.looks if self.publishes else 0


@contextlib.asynccontextmanager
async def doubting(books: Placing, life: Life, *endpoints: str) -> AsyncIterator[None]:
    places = [(endpoint, endpoint) for endpoint in endpoints]
    one = Doubts(books, lambda: places, life.sign, time.monotonic)
    await one.start()
    try:
        yield
    finally:
        await one.close()


async def test_a_worker_in_no_doubt_is_asked_nothing(engine: Engine) -> None:
    books, life = placing(), Life()
    books.loads.begin("10.0.0.9:1", 10, time.monotonic())  # of another one
    async with doubting(books, life, engine.endpoint):
        await until(lambda: life.looks >= 6)
    assert engine.asked == 0


async def test_a_worker_whose_events_alone_are_off_is_asked_and_stays(engine: Engine) -> None:
    books, life = placing(), Life()
    life.is_cut = True
    engine.status = 404  # nor does it know the path
    async with doubting(books, life, engine.endpoint):
        await until(lambda: engine.asked >= 2)
    assert books.dead == {}


async def test_a_worker_that_refuses_connections_is_left_out_until_it_is_back() -> None:
    books, life = placing(), Life()
    life.is_cut = True
    endpoint = f"127.0.0.1:{free_port()}"
    marks = books.sent.marks(Prompt("m", array("I", range(100))))
    books.sent.record(endpoint, marks, time.monotonic())
    async with doubting(books, life, endpoint):
        await until(lambda: endpoint in books.dead)
        assert not books.sent.expected(marks, time.monotonic())
        runner = web.AppRunner(web.Application())
        await runner.setup()
        await web.TCPSite(runner, *endpoint.split(":")).start()  # type: ignore[arg-type]
        await until(lambda: not books.dead)
        await runner.cleanup()


async def test_a_host_gone_silent_with_a_request_is_left_out() -> None:
    books = placing()
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel alone accepts
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        books.loads.begin(endpoint, 10, time.monotonic())
        async with doubting(books, Life(), endpoint):
            await until(lambda: endpoint in books.dead)
    assert books.dead[endpoint] == "does not answer: not a byte within 1 s"


async def test_a_worker_that_is_busy_and_publishes_is_not_left_out() -> None:
    books, life = placing(), Life()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        books.doubted.add(endpoint)  # so it is asked, and does not answer
        life.publishes = True
        async with doubting(books, life, endpoint):
            await until(lambda: not books.doubted)
    assert books.dead == {}


async def test_faults_that_a_worker_tells_of_itself_count_in_a_row(engine: Engine) -> None:
    books = placing()
    books.doubted.add(engine.endpoint)
    engine.status = 503
    async with doubting(books, Life(), engine.endpoint):
        await until(lambda: engine.endpoint in books.dead)
        assert engine.asked == FAILURES_UNTIL_DEAD
        engine.status = 200
        await until(lambda: not books.dead)
        assert not books.doubted


async def test_what_speaks_no_http_lives() -> None:
    async def other(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        await writer.drain()
        writer.close()

    books = placing()
    server = await asyncio.start_server(other, "127.0.0.1", 0)
    endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    books.doubted.add(endpoint)
    async with server, doubting(books, Life(), endpoint):
        await until(lambda: not books.doubted)
    assert books.dead == {}


async def test_a_worker_that_went_leaves_no_doubt_behind() -> None:
    books = placing()
    books.dead["gone:1"] = "is dead"
    books.doubted.add("gone:1")
    async with doubting(books, Life()):
        await until(lambda: not (books.dead or books.doubted))
