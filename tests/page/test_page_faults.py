"""What the live page shows when something is wrong, or somebody means harm."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.support.select import Select

from extproc.base.engine import Engine, Release
from extproc.base.fault import KINDS, Fault
from extproc.fleet.discovery.view import SourceReport
from extproc.fleet.records.engine_identity import EngineAnswer
from extproc.observing.outcomes import Circumstances, Outcome
from extproc.observing.usage import Usage
from extproc.proof.samples import AGREED, DISAGREED
from extproc.proof.state import Comparison, GoldenVerdict
from extproc.requests.prompt import CONVERSATION
from extproc.requests.request import PLAIN_REQUEST, Head, RoutingRequest
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from kvstate.overlap import Overlap
from kvtools.simulator.worker import SimulatedWorker
from tests.extproc.admin.decisions import decided
from tests.extproc.admin.serving import Served, serving
from tests.page.background import Background, in_background
from tests.page.browser import Browser
from tests.system.system import System, chat, long_text, running

pytestmark = pytest.mark.slow

WORKER = "127.0.0.1:1"
FOUND_NONE = "models: [{name: m}]\nworkers: []\ndiscovery: {file: /nowhere.yaml}"
EVIL = "<img src=x onerror=document.title='taken'>"


class Routers:
    """The source of GET /routers."""

    def __init__(self) -> None:
        self.status_now: dict[str, Any] = {"alone": "", "routers": []}

    def status(self) -> dict[str, Any]:
        return self.status_now


def test_page_names_the_other_routers_and_their_silence(browser: Browser) -> None:
    routers = Routers()
    with in_background(serving(sharing=routers)) as served, browser.visiting():
        browser.open(f"{served.it.url}/")
        browser.until(
            lambda: "No message from another router" in browser.texts("#routers")[0], "none yet"
        )
        routers.status_now["routers"] = [{"name": EVIL, "age_ms": 12.4, "in_flight": 3}]
        said = f"Shared with 1 other router: {EVIL} (12 ms ago, 3 in flight)."
        browser.until(lambda: browser.texts("#routers") == [said], "one is heard")
        routers.status_now["alone"] = "redis://a: gone"
        browser.until(lambda: browser.texts("#routers.notice")[0].endswith("gone"), "alone")


def test_faults_are_shown_with_what_to_do_until_they_end(browser: Browser) -> None:
    faults = [Fault("worker-asleep", f"worker {EVIL}", "it sleeps")]
    with in_background(serving(faults=faults)) as served, browser.visiting():
        browser.open(f"{served.it.url}/")
        said = f"worker {EVIL}: it sleeps"
        browser.until(lambda: browser.texts("#faults li")[0].startswith(said), "the fault")
        assert f"To do: {KINDS['worker-asleep'].fix}." in browser.texts("#faults li small")[0]
        faults.clear()
        browser.until(lambda: not browser.one("#faults").is_displayed(), "it has ended")


def test_verification_is_shown_in_words_and_as_text(browser: Browser) -> None:
    with in_background(serving()) as served, browser.visiting():
        record = served.it.workers.records[WORKER]

        async def compare(verdict: GoldenVerdict) -> None:
            record.proof.expect()
            served.it.workers.proofs.compared(record, Comparison(1, {CONVERSATION: verdict}))

        browser.open(f"{served.it.url}/")
        served.do(compare(GoldenVerdict(is_same=False, reason=f"of a text, after {EVIL}")))
        said = f"its tokens differ from the router's: of a text, after {EVIL}"
        browser.until(lambda: said in browser.texts("#workers tr")[0], "they differ")
        served.do(compare(GoldenVerdict(None, "it has not answered yet")))
        said = "its tokens are not proved: it has not answered yet"
        browser.until(lambda: said in browser.texts("#workers tr")[0], "nobody knows")
        served.do(compare(GoldenVerdict(is_same=True)))
        browser.until(lambda: "its tokens" not in browser.texts("#workers tr")[0], "all is well")


def test_engine_is_shown_or_why_it_is_unknown(browser: Browser) -> None:
    with in_background(serving()) as served, browser.visiting():
        record = served.it.workers.records[WORKER]
        browser.open(f"{served.it.url}/")

        async def say(answer: EngineAnswer) -> None:
            record.stop_asking("engine")
            record.identify(answer)

        served.do(say(EngineAnswer(reason=f"it is vllm, but {EVIL}")))
        said = f"its engine is unknown: it is vllm, but {EVIL}"
        browser.until(lambda: said in browser.texts("#workers tr")[0], "it is unknown")
        served.do(say(EngineAnswer(Engine("vllm", Release(0, 32)), "")))
        browser.until(lambda: "vllm 0.32.0" in browser.texts("#workers tr")[0], "it is known")
        assert "engine is unknown" not in browser.texts("#workers tr")[0]


def test_dead_worker_and_absent_router_are_shown_under_their_names(
    browser: Browser,
) -> None:
    with in_background(running(workers=2)) as system, browser.visiting():
        browser.open(f"{system.it.admin}/")
        dead = system.it.workers[1].endpoint
        system.do(system.it.stop_worker(dead))
        browser.until(lambda: "stale" in browser.texts("#workers .pill"), "a feed is stale")
        row = browser.texts("#workers tr")[0]
        assert row.startswith(dead)
        assert "connection lost" in row
        assert browser.texts("#announcer") == [f"{dead} is stale"]
        system.do(system.it.stop_router())
        browser.until(
            lambda: "router unreachable" in browser.texts("#connection")[0], "the router is away"
        )
        browser.driver.get("about:blank")  # so that no more of them fail
        assert all("ERR_" in one for one in browser.complaints())  # of requests that failed


@contextlib.contextmanager
def watched(browser: Browser) -> Iterator[Background[System]]:
    """The page of two workers that are probed."""
    probed = {"policy": {"probe_interval_ms": 1000}}
    with in_background(running(workers=2, changes=probed)) as system, browser.visiting():
        browser.open(f"{system.it.admin}/")
        yield system


def test_killed_worker_is_shown_down_without_requests(browser: Browser) -> None:
    with watched(browser) as system:
        dead = system.it.workers[1].endpoint
        system.do(system.it.stop_worker(dead))
        browser.until(lambda: browser.texts("#workers th .pill") == ["worker down"], "it is down")
        row = browser.texts("#workers tr")[0]
        assert row.startswith(dead)
        assert "the worker fails its health probe" in row
        assert "Check that its process runs" in row
        browser.until(lambda: browser.texts("#announcer") == [f"{dead} is down"], "it is told")
        assert "; 1 down" in browser.texts("#fleet-summary")[0]
        system.do(system.it.send(chat("to the other one")))
        words = "not possible: fails its health probe"
        browser.until(lambda: words in browser.texts("#last tbody")[0], "it cannot be picked")


def test_dead_feed_alone_is_not_shown_as_a_dead_worker(browser: Browser) -> None:
    with watched(browser) as system:
        worker = system.it.workers[1]
        system.do(hidden(worker, events=True))
        browser.until(lambda: "stale" in browser.texts("#workers .pill"), "a feed is stale")
        row = browser.texts("#workers tr")[0]
        assert row.startswith(worker.endpoint)
        assert "Its events no longer arrive" in row
        system.do(hidden(worker, events=False))
        browser.until(lambda: browser.texts("#workers .pill") == ["live"] * 2, "it is back")
        assert "Its events" not in browser.texts("#workers")[0]


def test_dead_replay_socket_is_shown_on_a_live_feed(browser: Browser) -> None:
    with watched(browser) as system:
        worker = system.it.workers[1]
        system.do(hidden(worker, replay=True))
        system.do(
            system.it.serve(worker, long_text("one"))
        )  # then it is quiet, and a replay is tried
        browser.until(lambda: "no replay" in browser.texts("#workers .pill"), "no replay")
        row = browser.texts("#workers tr")[0]
        assert row.startswith(worker.endpoint)
        assert "live" in row
        assert "replay failed" in row
        assert "Check that its replay port is correct" in row
        system.do(lost(worker))
        for seed in ("two", "three"):
            system.do(system.it.serve(worker, long_text(seed)))
        browser.until(lambda: "degraded" in browser.texts("#workers .pill"), "a gap stays")
        assert "are lost: replay failed" in browser.texts("#workers tr")[0]
        system.do(hidden(worker, replay=False))
        browser.until(lambda: browser.texts("#workers .pill") == ["live"] * 2, "it is back")


async def hidden(
    worker: SimulatedWorker, *, events: bool | None = None, replay: bool | None = None
) -> None:
    """Hides sockets of a worker, or shows them again."""
    if events is not None:
        worker.faults.hide_events(hidden=events)
    if replay is not None:
        worker.faults.hide_replay("absent" if replay else None)


async def lost(worker: SimulatedWorker) -> None:
    """Makes the next batch reach nobody."""
    worker.faults.drop(1)


def test_hostile_names_are_shown_as_text(browser: Browser) -> None:
    config = f'models: [{{name: "{EVIL}"}}]\nworkers: [{{endpoint: "127.0.0.1:1"}}]'
    with in_background(serving(config)) as served, browser.visiting():
        served.do(served.it.route(40, EVIL))
        browser.open(f"{served.it.url}/")
        browser.until(lambda: browser.all("#last tbody tr"), "the last request")
        browser.until(lambda: browser.all("#prefix-rows tr"), "its prefix")
        browser.unfold("prefixes")
        for place in ("#workers", "#last-body", "#decision-list", "#prefix-rows"):
            assert EVIL in browser.one(place).text
        assert browser.all("img") == []
        assert browser.driver.title == "KVSteer"


def test_names_of_any_length_are_shown_with_their_history(browser: Browser) -> None:
    names = [
        f"worker-{number}.{'long-' * 12}name.{'of-a-' * 12}zone.svc:8000" for number in range(50)
    ]
    config = "models: [{name: m}]\nworkers:\n" + "".join(
        f"- {{endpoint: '{one}'}}\n" for one in names
    )
    browser.size(360, 800)
    with in_background(serving(config)) as served, browser.visiting():
        steps = dict.fromkeys(names, (1, 2))
        served.do(_routed(served.it, names[-1], steps))
        browser.open(f"{served.it.url}/")
        browser.until(lambda: len(browser.texts("#workers th")) == len(names), "all workers")
        browser.until(lambda: len(browser.all("#workers svg")) == 1, "the one history")
        assert browser.texts("#connection") == ["connected"]
        assert browser.run("return document.documentElement.scrollWidth") <= 360


async def _routed(served: Served, worker: str, steps: dict[str, tuple[int, int]]) -> None:
    """Records that a worker was sent a request in the step before this one."""
    chosen = decided({worker: Overlap(16, (1, 0, 0, 0), 0)}, names=list(steps))
    served.observations.begin(PLAIN_REQUEST, Query("m"), chosen, 0.0)
    served.observations.sample(5.0, steps)


# The circumstances of a worker that held nothing of a prompt any more once it had answered.
AFTERWARDS = Circumstances()


def test_reported_tokens_are_shown_beside_the_prediction(browser: Browser) -> None:
    outcome = Outcome(
        model="m",
        worker=WORKER,
        is_moved=False,
        status=200,
        ttft_seconds=0.1,
        prompt_tokens=64,
        predicted_tokens=48,
        reported=Usage(64, 32),
        is_comparable=True,
    )
    with in_background(serving()) as served, browser.visiting():
        served.it.workers.records[WORKER].outcomes.drift.count(outcome, lambda: AFTERWARDS)
        browser.open(f"{served.it.url}/")
        (text,) = browser.texts("#workers .outcome")
        assert text.startswith("48 cached tokens predicted, 32 reported in 1 request")
        assert text.endswith("; differences: evicted 1")


def test_token_ids_that_went_along_are_shown_and_why_they_no_longer_do(browser: Browser) -> None:
    with in_background(serving()) as served, browser.visiting():
        samples = served.it.workers.records[WORKER].proof.samples
        samples.note_result(AGREED, (), 64, samples.start)
        samples.note_handed((), 12_345)
        browser.open(f"{served.it.url}/")
        said = "12,345 tokens handed over as ids in 1 request"
        assert browser.texts("#workers .handing") == [said]
        samples.note_result(DISAGREED, (), 64, samples.start, "it counted 3")
        browser.until(
            lambda: (
                browser.texts("#workers .handing") == [f"{said}; none go any more: it counted 3"]
            ),
            "why none go any more",
        )


@pytest.mark.parametrize(
    ("usage", "shown"), [(Usage(64, 32), "50 %"), (Usage(64, None), "not reported")]
)
def test_headline_is_what_engines_reported_and_not_what_was_certain(
    browser: Browser, usage: Usage, shown: str
) -> None:
    outcome = Outcome("m", WORKER, False, 200, 0.1, 64, 16, usage, is_comparable=True)
    made = decided({WORKER: Overlap(16, (1, 0, 0, 0), 0)}, names=[WORKER])
    with in_background(serving()) as served, browser.visiting():
        served.do(_answered(served.it, made, outcome))
        browser.open(f"{served.it.url}/")
        browser.until(lambda: browser.texts("#gain-rate") == [shown], "the share")
        browser.until(lambda: browser.texts("#gain-certain") == ["50 %"], "of 32 prompt tokens")


async def _answered(served: Served, decision: Decision, outcome: Outcome) -> None:
    observations = served.observations
    observations.begin(PLAIN_REQUEST, Query("m"), decision, 0.0)
    observations.note_end(decision, outcome, is_booked=True, is_sent=True)
    observations.sample(5.0, {WORKER: (0, 0)})


def test_draining_worker_and_absent_source_are_shown(browser: Browser) -> None:
    with in_background(serving(sources=[Away()])) as served, browser.visiting():
        served.do(_drained(served.it))
        browser.open(f"{served.it.url}/")
        assert "draining: takes no new requests" in browser.texts("#workers tr")[0]
        assert browser.texts("#fleet-summary")[0].startswith("1 worker: 1 unsupported; 1 draining")
        browser.until(
            lambda: browser.texts("#sources li") == ["pods: no answer; it has listed none yet"],
            "the source",
        )
        assert browser.one("#sources").is_displayed()


async def _drained(served: Served) -> None:
    assert served.workers.drain(WORKER, draining=True)


class Away:
    """A source that does not answer."""

    name = "pods"

    async def run(self, report: SourceReport) -> None:
        report.fault("no answer")
        await asyncio.Event().wait()


def test_last_request_shows_the_best_few_of_many_candidates(browser: Browser) -> None:
    config = "models: [{name: m}]\nworkers:\n" + "".join(
        f"- {{endpoint: '127.0.0.1:{port}'}}\n" for port in range(1, 31)
    )
    with in_background(serving(config)) as served, browser.visiting():
        served.do(served.it.route(40))
        browser.open(f"{served.it.url}/")
        browser.until(lambda: len(browser.all("#last tbody tr")) == 3, "a few")
        assert "and 27 more candidates" in browser.one("#last").text
        browser.click("#decision-list summary")
        browser.until(lambda: len(browser.all("details[open] tbody tr")) == 30, "all of them")


def test_decision_names_the_prefill_worker(browser: Browser) -> None:
    with in_background(serving(OF_ROLES)) as served, browser.visiting():
        served.do(_chatted(served.it))
        browser.open(f"{served.it.url}/")
        words = "Its prompt is computed by 127.0.0.1:1: the decode worker cannot"
        browser.until(lambda: words in "".join(browser.texts("#last .verdict")), "both workers")
        assert "127.0.0.1:2 with 127.0.0.1:1" in browser.texts("#decision-list .said")[0]


OF_ROLES = """
models: [{name: m}]
workers:
- {endpoint: "127.0.0.1:1", role: prefill}
- {endpoint: "127.0.0.1:2", role: decode}
disaggregation: {mode: header, connector: sglang}
"""


def test_request_without_known_tokens_names_the_reason(browser: Browser) -> None:
    with in_background(serving()) as served, browser.visiting():
        served.do(_chatted(served.it))
        browser.open(f"{served.it.url}/")
        browser.until(lambda: browser.texts("#last .verdict"), "the last request")
        words = "because load alone decided: its model has no tokenizer here."
        assert words in browser.texts("#last .verdict")[0]
        assert browser.texts("#decision-list .share")[0].startswith("0 of about 6 tokens held")


async def _chatted(served: Served) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    await served.router.route(RoutingRequest(Head("POST", "/v1/chat/completions", None), body))


NAMED = """
models: [{name: m}, {name: n}]
workers:
- {endpoint: "localhost:1", model: m}
- {endpoint: "127.0.0.1:2", model: n}
"""


def test_decisions_are_filtered_by_model_worker_and_reason(browser: Browser) -> None:
    with in_background(serving(NAMED)) as served, browser.visiting():
        for model in ("m", "n", "m"):
            served.do(served.it.route(40, model))
        browser.open(f"{served.it.url}/")
        browser.until(lambda: len(browser.all("#decision-list li")) == 3, "all of them")
        for kind, value, shown in (("model", "m", 2), ("worker", "127.0.0.1:2", 0)):
            chosen(browser, kind, value)
            assert len(browser.all("#decision-list li")) == shown
        chosen(browser, "model", "")
        assert len(browser.all("#decision-list li")) == 1
        chosen(browser, "reason", "nothing_cached")
        assert len(browser.all("#decision-list li")) == 1
        served.do(served.it.route(40, "m"))
        served.do(served.it.route(40, "n"))
        browser.until(lambda: len(browser.all("#decision-list li")) == 2, "what matches is put in")


def chosen(browser: Browser, kind: str, value: str) -> None:
    Select(browser.one(f"#filter-{kind}")).select_by_value(value)


def test_workers_have_their_configured_names(browser: Browser) -> None:
    with in_background(serving(NAMED)) as served, browser.visiting():
        served.do(served.it.route(40, "m"))
        browser.open(f"{served.it.url}/")
        picked = "The router picked localhost:1 because"
        browser.until(lambda: browser.texts("#last .verdict")[0].startswith(picked), "its name")
        assert browser.texts("#last tbody th small")[0] == "127.0.0.1:1"
        browser.until(lambda: browser.texts("#decision-list .said strong") == ["localhost:1"], "")
        assert browser.texts("#decision-list .said small") == ["127.0.0.1:1"]


def test_router_without_workers_shows_the_cause(browser: Browser) -> None:
    with in_background(serving(FOUND_NONE, sources=[Away()])) as served, browser.visiting():
        browser.driver.get(f"{served.it.url}/")
        browser.until(
            lambda: browser.texts("#fleet-summary")[0].startswith("0 workers: none known ·"),
            "no workers",
        )
        browser.until(lambda: browser.one("#sources").is_displayed(), "the cause")


def test_empty_router_shows_the_next_step(browser: Browser) -> None:
    with in_background(serving()) as served, browser.visiting():
        browser.open(f"{served.it.url}/")
        assert browser.texts("#last-body")[0].startswith("No request yet.")
        browser.until(
            lambda: browser.texts("#prefixes-summary") == ["No prompts yet."], "no prompts"
        )
