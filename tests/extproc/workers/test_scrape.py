import time
from array import array
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from extproc.config.reader import parse
from extproc.picking.load import REPORT_SECONDS, Loads
from extproc.picking.sent import Sent
from extproc.picking.upstreams import Judge
from extproc.workers.asking import FAILURES_UNTIL_UNFIT, LoadReports, Pace
from extproc.workers.polling import Client, Polling
from extproc.workers.record import Table
from extproc.workers.workers import Workers
from kvstate.events import EngineLoad
from kvstate.fleet import Fleet
from kvstate.overlap import Prompt
from tests.extproc.workers.asked import against, client, only, pace, running, table_of, until

METRICS = "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n"
UNFIT = "does not answer on its endpoint"


class Engine:
    """An HTTP server with /metrics, on its own port."""

    def __init__(self) -> None:
        self.text = METRICS
        self.status = 200
        self.asked = 0
        self.endpoint = ""
        self.before_answer: Callable[[], None] = lambda: None

    async def metrics(self, _: web.Request) -> web.Response:
        self.asked += 1
        self.before_answer()
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
async def http() -> AsyncIterator[Client]:
    async with client() as one:
        yield one


def reports(
    table: Table, feeds: list[tuple[EngineLoad, float]] | None = None, at: Pace | None = None
) -> LoadReports:
    loads = Loads(table.upstreams.loads)
    return LoadReports(table, loads, lambda _: feeds or [], at or pace(), time.monotonic)


def workers(endpoint: str, policy: str) -> Workers:
    text = f"models: [{{name: m}}]\nworkers: [{{endpoint: '{endpoint}'}}]\npolicy: {policy}"
    return Workers(parse(text, "c"), Fleet(1, lambda: 0.0), lambda _: [], chance=lambda: 0.5)


def others(table: Table) -> float:
    endpoint = only(table).endpoint
    return Loads(table.upstreams.loads).load(endpoint, time.monotonic()).others


async def test_a_workers_metrics_tell_what_others_sent_it(engine: Engine, http: Client) -> None:
    table = table_of(engine.endpoint)
    await reports(table).ask(http, only(table))
    (upstream,) = table.upstreams
    assert upstream.load.report is not None
    assert (upstream.load.report.running, upstream.load.report.waiting) == (3, 1)


@pytest.mark.parametrize(("text", "status"), [("nothing", 200), (METRICS, 404)])
async def test_a_worker_that_does_not_tell_its_load_is_still_fit(
    engine: Engine, http: Client, text: str, status: int
) -> None:
    engine.text, engine.status = text, status
    table = table_of(engine.endpoint)
    for _ in range(FAILURES_UNTIL_UNFIT):
        await reports(table).ask(http, only(table))
    assert (others(table), against(table, Judge.SCRAPES)) == (0.0, {})


async def test_a_worker_that_cannot_be_reached_is_unfit_until_it_can_be(
    engine: Engine, http: Client
) -> None:
    table, sent = table_of(engine.endpoint), Sent(1)
    marks = sent.marks(Prompt("m", array("I", range(100))))
    sent.record(only(table).holdings, marks, time.monotonic())
    hasty = reports(table, at=pace(1e-6))
    for number in range(FAILURES_UNTIL_UNFIT):
        assert not against(table, Judge.SCRAPES), number
        await hasty.ask(http, only(table))
    assert against(table, Judge.SCRAPES) == {engine.endpoint: UNFIT}
    assert not sent.expected(marks, time.monotonic())
    await reports(table).ask(http, only(table))
    assert against(table, Judge.SCRAPES) == {}


async def test_a_death_that_the_probe_told_is_not_told_again(
    engine: Engine, http: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvsteer")
    table = table_of(engine.endpoint)
    (upstream,) = table.upstreams
    table.upstreams.eject(upstream, Judge.PROBE, "fails its health probe")
    hasty = reports(table, at=pace(1e-6))
    for _ in range(FAILURES_UNTIL_UNFIT):
        await hasty.ask(http, only(table))
    assert against(table, Judge.SCRAPES)
    await reports(table).ask(http, only(table))
    assert caplog.messages == []


async def test_load_that_a_feed_carries_is_preferred(engine: Engine, http: Client) -> None:
    table = table_of(engine.endpoint)
    asking = reports(table, [(EngineLoad(9, 0), 0.0)])
    await asking.ask(http, only(table))
    assert others(table) == 0.0
    polling = Polling()
    polling.start([asking.look])
    await until(lambda: others(table) > 8)
    await polling.close()


@pytest.mark.parametrize(
    ("ages", "asked"), [([0.0], 0), ([REPORT_SECONDS + 1], 1), ([0.0, REPORT_SECONDS], 1), ([], 1)]
)
async def test_a_worker_whose_feeds_tell_its_load_is_not_asked_for_it(
    engine: Engine, http: Client, ages: list[float], asked: int
) -> None:
    table = table_of(engine.endpoint)
    await reports(table, [(EngineLoad(1, 0), age) for age in ages]).ask(http, only(table))
    assert engine.asked == asked


async def test_a_worker_that_was_unfit_is_asked_even_if_its_feeds_tell_its_load(
    engine: Engine, http: Client
) -> None:
    table = table_of(engine.endpoint)
    (upstream,) = table.upstreams
    table.upstreams.eject(upstream, Judge.SCRAPES, UNFIT)
    await reports(table, [(EngineLoad(1, 0), 0.0)]).ask(http, only(table))
    assert against(table, Judge.SCRAPES) == {}


async def test_workers_are_asked_again_and_again_if_that_is_configured(engine: Engine) -> None:
    async with running(workers(engine.endpoint, "{scrape_interval_ms: 50}")) as one:
        await until(lambda: engine.asked >= 3)
        assert one.load(engine.endpoint).others > 0


async def test_by_default_no_worker_is_asked(engine: Engine) -> None:
    async with running(workers(engine.endpoint, "{}")):
        pass
    assert engine.asked == 0


async def test_the_next_worker_at_an_address_that_failed_is_left_out_too(http: Client) -> None:
    table = table_of("127.0.0.1:1")
    for _ in range(2):
        asking = reports(table)
        for _ in range(FAILURES_UNTIL_UNFIT):
            await asking.ask(http, only(table))
        assert against(table, Judge.SCRAPES) == {"127.0.0.1:1": UNFIT}
        member = only(table).member
        table.replace({})
        table.replace({"127.0.0.1:1": member})
        assert against(table, Judge.SCRAPES) == {}


async def test_an_answer_that_is_later_than_the_end_of_its_worker_leaves_nothing(
    engine: Engine, http: Client
) -> None:
    table = table_of(engine.endpoint)
    worker = only(table)

    def end() -> None:
        table.replace({})
        table.replace({engine.endpoint: worker.member})

    engine.before_answer = end
    await reports(table).ask(http, worker)
    assert (engine.asked, others(table)) == (1, 0.0)
