import asyncio
from array import array
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from extproc.observing.decisions import Timeline, TraceContext
from extproc.observing.metrics import AT_ONCE, Metrics
from extproc.observing.usage import Usage
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.endpoint_load import LoadSample
from extproc.routing.load.loads import Load
from kvstate.overlap import Prompt
from tests.extproc.nobody import Nobody
from tests.extproc.observing.records import records
from tests.extproc.observing.simulated import BEGIN, over

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def decision() -> Decision:
    snapshot = Snapshot([Candidate("w", "w:1")], [{}], lambda *_: Load(), "cost", 0)
    return decide(
        PLAIN_REQUEST, Query("m", [Prompt("m", array("I", range(9)))]), snapshot, 0.0, Random(0)
    )


def timeline(trace: TraceContext | None = None) -> Timeline:
    times = iter((1.0, 1.003))
    one = Timeline.begin(lambda: next(times))
    one.picked_at = one.clock()
    one.trace = trace or one.trace
    return one


def worker(name: str) -> dict[str, Any]:
    """A worker as GET /workers shows it."""
    feed = {"rank": 0, "state": "live", "lag_seconds": 0.5, "orphans": 0, "uncertain_blocks": 0}
    feed |= {"gaps": 1, "replays": 2, "restarts": 0, "counts": {"batches": 3}}
    return {
        "name": name,
        "endpoint": f"{name}:1",
        "model": "m",
        "state": "live",
        "block_size": 16,
        "blocks_by_tier": {"device": 4},
        "in_flight": 5,
        "contexts": {"conversations": 3, "live_tokens": 90_000, "cache_tokens": None},
        "speed": {"tokens_per_second": 12_000, "confidence": 0.75},
        "engine": {"name": "vllm", "version": "0.32.0", "frontend": "python", "source": "learned"},
        "down": "",
        "astray": "",
        "failed_halves": 2,
        "saved_tokens": 77,
        "transfers": {"tokens_per_second": 4_000, "sent_tokens": 12},
        "tokens": {
            "matched": 0,
            "mismatched": 0,
            "without_evidence": 0,
            "state": "proved",
            "doubted": False,
        },
        "feeds": [feed],
    }


def samples(metrics: Metrics) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(generate_latest(metrics).decode()):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def test_decision_is_counted_with_its_time() -> None:
    metrics = Metrics(Nobody())
    metrics.observe_decision(decision(), timeline())
    shown = list(samples(metrics))
    labels = {"model": "m", "reason": "nothing_cached"}
    assert ("kvsteer_decisions_total", labels, 1.0) in shown
    assert ("kvsteer_decision_seconds_bucket", {"le": "0.005"}, 1.0) in shown
    assert ("kvsteer_decision_seconds_bucket", {"le": "0.0025"}, 0.0) in shown
    assert ("kvsteer_phase_seconds_count", {"phase": "pick"}, 1.0) in shown


async def test_openmetrics_exposition_shows_the_trace_of_a_decision() -> None:
    metrics = Metrics(Nobody(), clock=lambda: 12.5)
    metrics.observe_decision(decision(), timeline(TraceContext(TRACE, is_sampled=True)))
    text, content_type = await metrics.exposed(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    families = {one.name: one for one in openmetrics_families(text.decode())}  # type: ignore[no-untyped-call]
    found = [one.exemplar for one in families["kvsteer_decision_seconds"].samples if one.exemplar]
    assert [(one.labels, float(one.timestamp or 0)) for one in found] == [
        ({"trace_id": TRACE}, 12.5)
    ]


async def test_exposition_omits_an_unrecorded_trace() -> None:
    metrics = Metrics(Nobody())
    metrics.observe_decision(decision(), timeline(TraceContext(TRACE, is_sampled=False)))
    assert TRACE.encode() not in (await metrics.exposed(OPENMETRICS))[0]


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/html", "application/openmetrics-text;version=abc", ";;,,=\x00"]
)
async def test_exposition_is_text_for_any_accept_header(accept: str) -> None:
    text, content_type = await Metrics(Nobody()).exposed(accept)
    assert b"kvsteer_open_streams 0.0" in text
    assert "text" in content_type


def test_series_of_a_removed_worker_end() -> None:
    fleet = Nobody()
    fleet.shown = [worker("stays"), worker("goes")]
    metrics = Metrics(fleet)
    assert {labels.get("worker") for _, labels, _ in samples(metrics)} >= {"stays", "goes"}
    del fleet.shown[1]
    assert {labels["worker"] for _, labels, _ in samples(metrics) if "worker" in labels} == {
        "stays"
    }


def test_cost_terms_of_a_worker_are_shown() -> None:
    fleet = Nobody()
    fleet.shown, fleet.loads = [worker("w")], Load(1, 512.0, 2.0, 0.25, LoadSample(1, 0, 0.0), 1.5)
    metrics = Metrics(fleet)
    shown = {name: value for name, labels, value in samples(metrics) if labels == {"worker": "w"}}
    assert shown["kvsteer_worker_backlog_tokens"] == 512
    assert shown["kvsteer_worker_failed_halves_total"] == 2
    assert shown["kvsteer_worker_saved_tokens"] == 77
    assert shown["kvsteer_worker_prefill_tokens_per_second"] == 12_000
    assert shown["kvsteer_worker_speed_confidence"] == 0.75
    assert shown["kvsteer_worker_other_requests"] == 2
    assert shown["kvsteer_worker_utilization"] == 0.25
    assert shown["kvsteer_worker_report_age_seconds"] == 1.5


async def test_read_reads_workers_in_turns_and_shows_them_whole() -> None:
    names = [f"w{number}" for number in range(3 * AT_ONCE)]
    looked: list[str] = []

    class Noting(Nobody):
        def statuses(self) -> Iterator[dict[str, Any]]:
            for name in names:
                looked.append(name)
                yield worker(name)

    metrics = Metrics(Noting())
    reading = asyncio.create_task(metrics.read())
    await asyncio.sleep(0)
    assert len(looked) == AT_ONCE
    families = {one.name: one for one in (await reading).collect()}
    assert [one.labels["worker"] for one in families["kvsteer_worker_in_flight"].samples] == names
    assert families["kvsteer_index_bytes"].samples[0].value == 7


def test_readiness_is_shown() -> None:
    metrics, ready = Metrics(Nobody()), False
    metrics.show_readiness(lambda: ready)
    assert ("kvsteer_ready", {}, 0.0) in list(samples(metrics))
    ready = True
    assert ("kvsteer_ready", {}, 1.0) in list(samples(metrics))


def test_remote_tokenizers_away_are_shown() -> None:
    metrics = Metrics(Nobody())
    metrics.show_tokenizers_away("m", lambda: 2)
    assert ("kvsteer_remote_tokenizers_away", {"model": "m"}, 2.0) in list(samples(metrics))


def test_figures_of_a_model_exist_before_its_first_request() -> None:
    metrics = Metrics(Nobody())
    metrics.expect_models(["m"])
    assert ("kvsteer_prompt_tokens_total", {"model": "m"}, 0.0) in list(samples(metrics))


def test_report_includes_tokens_that_the_engine_left_out() -> None:
    fleet, now = Nobody(), BEGIN
    fleet.records = records("w:1")
    fleet.tokens_per_second = lambda _: 500.0  # type: ignore[method-assign]
    metrics = Metrics(fleet, lambda: now)
    for cached in (500, None):
        metrics.observe_outcome(over(cached, reported=Usage(1_000, cached, "prompt")))
    side = metrics.report.window(60, now).periods[-1].steered
    assert (side.reported, side.cached_tokens, side.saved_seconds) == (2, 500, 1.0)
