import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from aiohttp import web

from extproc.config import Config, Model
from extproc.picking.load import Report
from extproc.picking.placing import Placing
from extproc.workers.asking import FAILURES_UNTIL_UNFIT, LoadReports, Place
from kvstate.events import EngineLoad
from kvstate.overlap import Prompt

METRICS = "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n"
DEADLINE_SECONDS = 20


class Engine:
    """An HTTP server with /metrics, on a port of its own."""

    def __init__(self) -> None:
        self.text = METRICS
        self.status = 200
        self.asked = 0
        self.endpoint = ""

    async def metrics(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(text=self.text, status=self.status)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    one = Engine()
    application = web.Application()
    application.router.add_get("/metrics", one.metrics)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
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


def reports(
    books: Placing,
    place: Place,
    feeds: list[tuple[EngineLoad, float]] | None = None,
    interval_seconds: float = 0.0,
) -> LoadReports:
    return LoadReports(
        books, lambda: [place], lambda _: feeds or [], interval_seconds, lambda: 0.5, time.monotonic
    )


def others(books: Placing, endpoint: str) -> float:
    return books.loads.load(endpoint, time.monotonic()).others


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.01)


async def test_a_workers_metrics_tell_what_others_sent_it(
    engine: Engine, session: aiohttp.ClientSession
) -> None:
    books = placing()
    await reports(books, ("a", engine.endpoint)).ask(session, ("a", engine.endpoint))
    report = books.loads.load(engine.endpoint, time.monotonic()).report
    assert report is not None
    assert (report.running, report.waiting) == (3, 1)


@pytest.mark.parametrize(("text", "status"), [("nothing", 200), (METRICS, 404)])
async def test_a_worker_that_does_not_tell_its_load_is_still_fit(
    engine: Engine, session: aiohttp.ClientSession, text: str, status: int
) -> None:
    engine.text, engine.status = text, status
    books = placing()
    asking = reports(books, ("a", engine.endpoint))
    for _ in range(FAILURES_UNTIL_UNFIT):
        await asking.ask(session, ("a", engine.endpoint))
    assert (others(books, engine.endpoint), books.unfit) == (0.0, {})


async def test_a_worker_that_cannot_be_reached_is_unfit_until_it_can_be(
    engine: Engine, session: aiohttp.ClientSession
) -> None:
    books = placing()
    endpoint = engine.endpoint
    marks = books.sent.marks(Prompt("m", array("I", range(100))))
    books.sent.record("a", marks, time.monotonic())
    asking = reports(books, ("a", endpoint))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1e-6)) as hasty:
        for number in range(FAILURES_UNTIL_UNFIT):
            assert not books.unfit, number
            await asking.ask(hasty, ("a", endpoint))
    assert books.unfit == {endpoint: "does not answer on its endpoint"}
    assert not books.sent.expected(marks, time.monotonic())
    await asking.ask(session, ("a", endpoint))
    assert books.unfit == {}


async def test_a_death_that_the_probe_told_is_not_told_again(
    engine: Engine, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvsteer")
    books, endpoint = placing(), engine.endpoint
    books.unhealthy[endpoint] = "fails its health probe"
    asking = reports(books, ("a", endpoint))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1e-6)) as hasty:
        for _ in range(FAILURES_UNTIL_UNFIT):
            await asking.ask(hasty, ("a", endpoint))
    assert endpoint in books.unfit
    await asking.ask(session, ("a", endpoint))
    assert caplog.messages == []


async def test_load_that_a_feed_carries_is_preferred(
    engine: Engine, session: aiohttp.ClientSession
) -> None:
    books = placing()
    asking = reports(books, ("a", engine.endpoint), [(EngineLoad(9, 0), 0.0)])
    await asking.ask(session, ("a", engine.endpoint))
    assert others(books, engine.endpoint) == 0.0
    await asking.start()
    await until(lambda: others(books, engine.endpoint) > 8)
    await asking.close()


async def test_workers_are_asked_again_and_again_if_that_is_configured(engine: Engine) -> None:
    books = placing()
    asking = reports(books, ("a", engine.endpoint), interval_seconds=0.05)
    await asking.start()
    await until(lambda: engine.asked >= 3)
    await asking.close()
    assert others(books, engine.endpoint) > 0


async def test_by_default_no_worker_is_asked(engine: Engine) -> None:
    books = placing()
    asking = reports(books, ("a", engine.endpoint), [(EngineLoad(9, 0), 0.0)])
    await asking.start()
    await until(lambda: others(books, engine.endpoint) > 0)
    await asking.close()
    assert engine.asked == 0


async def test_the_next_worker_at_an_address_that_failed_is_left_out_too(
    session: aiohttp.ClientSession,
) -> None:
    books, place = placing(), ("a", "127.0.0.1:1")
    asking = reports(books, place)
    for _ in range(FAILURES_UNTIL_UNFIT + 1):
        await asking.ask(session, place)
    books.remove(*place, time.monotonic())
    await asking.ask(session, place)
    assert list(books.unfit) == ["127.0.0.1:1"]


async def test_an_answer_that_is_later_than_the_end_of_its_worker_leaves_nothing() -> None:
    books = placing()
    books.loads.report("10.0.0.1:1", Report(3, 0, time.monotonic()), time.monotonic())
    asking = reports(books, ("a", "127.0.0.1:1"))
    await asking.start()
    await until(lambda: others(books, "10.0.0.1:1") == 0.0)
    await asking.close()
