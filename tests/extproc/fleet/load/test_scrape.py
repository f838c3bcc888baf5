import time
from array import array

import pytest

from extproc.fleet.asking.ask_interval import AskInterval
from extproc.fleet.asking.polling import Client, Polling
from extproc.fleet.load.load_reports import LoadReports
from extproc.fleet.records.table import Table
from extproc.routing.claims.claim_table import ClaimTable
from extproc.routing.health.evidence import RULES, Judge
from extproc.routing.load.loads import REPORT_SECONDS, Loads
from kvstate.events import EngineLoad
from kvstate.overlap import Prompt
from tests.extproc.fleet.asked import (
    METRICS,
    Engine,
    against,
    interval,
    only,
    running,
    table_of,
    workers_of,
)
from tests.waiting import until

UNFIT = "does not answer on its endpoint"


def reports(
    table: Table, feeds: list[tuple[EngineLoad, float]] | None = None, at: AskInterval | None = None
) -> LoadReports:
    loads = Loads(table.upstreams.loads)
    return LoadReports(table, loads, lambda _: feeds or [], at or interval(), time.monotonic)


def others(table: Table) -> float:
    endpoint = only(table).endpoint
    return Loads(table.upstreams.loads).load(endpoint, time.monotonic()).others


async def test_scrape_reads_requests_of_others_from_metrics(engine: Engine, http: Client) -> None:
    table = table_of(engine.endpoint)
    await reports(table).ask(http, only(table))
    (upstream,) = table.upstreams
    assert upstream.load.report is not None
    assert (upstream.load.report.running, upstream.load.report.waiting) == (3, 1)


@pytest.mark.parametrize(("text", "status"), [("nothing", 200), (METRICS, 404)])
async def test_scrape_without_load_keeps_a_worker_fit(
    engine: Engine, http: Client, text: str, status: int
) -> None:
    engine.text, engine.status = text, status
    table = table_of(engine.endpoint)
    for _ in range(RULES[Judge.SCRAPES].failures):
        await reports(table).ask(http, only(table))
    assert (others(table), against(table, Judge.SCRAPES)) == (0.0, {})


async def test_scrape_failure_ejects_a_worker_until_it_answers(
    engine: Engine, http: Client
) -> None:
    table, sent = table_of(engine.endpoint), ClaimTable(1)
    marks = sent.marks(Prompt("m", array("I", range(100))))
    sent.record(only(table).holdings, marks, time.monotonic())
    hasty = reports(table, at=interval(1e-6))
    for number in range(RULES[Judge.SCRAPES].failures):
        assert not against(table, Judge.SCRAPES), number
        await hasty.ask(http, only(table))
    assert against(table, Judge.SCRAPES) == {engine.endpoint: UNFIT}
    assert not sent.expected(marks, time.monotonic())
    await reports(table).ask(http, only(table))
    assert against(table, Judge.SCRAPES) == {}


async def test_scrape_does_not_log_a_death_that_the_probe_logged(
    engine: Engine, http: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvsteer")
    table = table_of(engine.endpoint)
    (upstream,) = table.upstreams
    table.upstreams.eject(upstream, Judge.PROBE, "fails its health probe", 0.0)
    hasty = reports(table, at=interval(1e-6))
    for _ in range(RULES[Judge.SCRAPES].failures):
        await hasty.ask(http, only(table))
    assert against(table, Judge.SCRAPES)
    await reports(table).ask(http, only(table))
    assert caplog.messages == []


async def test_load_in_a_feed_is_preferred_to_a_scrape(engine: Engine, http: Client) -> None:
    table = table_of(engine.endpoint)
    asking = reports(table, [(EngineLoad(9, 0), 0.0)])
    await asking.ask(http, only(table))
    assert others(table) == 0.0
    polling = Polling()
    polling.start([asking.check])
    await until(lambda: others(table) > 8)
    await polling.close()


@pytest.mark.parametrize(
    ("ages", "asked"), [([0.0], 0), ([REPORT_SECONDS + 1], 1), ([0.0, REPORT_SECONDS], 1), ([], 1)]
)
async def test_scrape_skips_a_worker_with_fresh_load_in_its_feeds(
    engine: Engine, http: Client, ages: list[float], asked: int
) -> None:
    table = table_of(engine.endpoint)
    await reports(table, [(EngineLoad(1, 0), age) for age in ages]).ask(http, only(table))
    assert engine.asked == asked


async def test_scrape_asks_an_unfit_worker_even_with_load_in_its_feeds(
    engine: Engine, http: Client
) -> None:
    table = table_of(engine.endpoint)
    (upstream,) = table.upstreams
    table.upstreams.eject(upstream, Judge.SCRAPES, UNFIT, 0.0)
    await reports(table, [(EngineLoad(1, 0), 0.0)]).ask(http, only(table))
    assert against(table, Judge.SCRAPES) == {}


async def test_scrape_repeats_at_a_configured_interval(engine: Engine) -> None:
    async with running(workers_of(engine.endpoint, "{scrape_interval_ms: 50}")) as one:
        await until(lambda: engine.asked >= 3 and one.states.load(engine.endpoint).others > 0)


async def test_scrape_is_off_by_default(engine: Engine) -> None:
    async with running(workers_of(engine.endpoint, "{}")):
        pass
    assert engine.asked == 0


async def test_scrape_ejection_passes_to_a_new_worker_at_the_same_address(http: Client) -> None:
    table = table_of("127.0.0.1:1")
    for _ in range(2):
        asking = reports(table)
        for _ in range(RULES[Judge.SCRAPES].failures):
            await asking.ask(http, only(table))
        assert against(table, Judge.SCRAPES) == {"127.0.0.1:1": UNFIT}
        member = only(table).member
        table.replace({})
        table.replace({"127.0.0.1:1": member})
        assert against(table, Judge.SCRAPES) == {}


async def test_scrape_answer_after_removal_of_its_worker_is_ignored(
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
