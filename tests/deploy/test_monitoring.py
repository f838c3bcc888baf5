"""The dashboard and the alerts, run by a real Prometheus on what a real system shows."""

import contextlib
import json
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvtools.simulator.worker import SimulatedWorker
from tests.deploy.prometheus_process import Prometheus, needs_prometheus, running_prometheus
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "kvsteer.json").read_text())
RULES = ROOT / "deploy" / "prometheus" / "kvsteer.rules.yml"
METRICS = set(
    re.findall(r"^- `(kvsteer_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
)

# Parts of queries that have no samples in a small, healthy system.
ABSENT = (
    "kind!~",
    "kvsteer_answered_elsewhere_total",
    "kvsteer_bodies_refused_total",
    "kvsteer_connection_faults_total",
    "kvsteer_disaggregation_total",
    "kvsteer_class_",
    "kvsteer_held_requests",
    "kvsteer_hold",
    "kvsteer_hand",
    "kvsteer_token_handover",
    "kvsteer_isolated_requests_total",
    "kvsteer_turn_",
    "kvsteer_again_seconds_total",
    "kvsteer_last_prompts",
    "kvsteer_media_items_total",
    "kvsteer_probe",
    "kvsteer_state_file_",
    "kvsteer_discovery_",
    "kvsteer_prediction_drifts_total",
    "kvsteer_process_role",
    "kvsteer_recorded_total",
    "kvsteer_not_recorded_total",
    "kvsteer_remote_tokenizer",
    "kvsteer_served_elsewhere_total",
    "kvsteer_sharing_",
    "kvsteer_tls_",
    "kvsteer_worker_failed_halves_total",
    "kvsteer_worker_report_age_seconds",
)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def exprs() -> list[str]:
    """The panels' queries, as Grafana sends them with every variable set to all."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [re.sub(r"\$(instance|model|worker)", ".*", one) for one in found]


def used_in(expr: str) -> set[str]:
    return {re.sub(r"_(bucket|count)$", "", name) for name in re.findall(r"kvsteer_\w+", expr)}


def test_dashboard_and_alerts_query_existing_metrics() -> None:
    rules = "\n".join(re.findall(r"expr: (.*?)\n    (?:for|labels):", RULES.read_text(), re.DOTALL))
    assert used_in("\n".join(exprs())) <= METRICS
    assert used_in(rules) <= METRICS


def test_dashboard_shows_every_metric() -> None:
    unshown = {
        "kvsteer_process_role",
        "kvsteer_worker_block_size_tokens",
        "kvsteer_worker_engine",
        "kvsteer_worker_transfer_tokens_per_second",
        "kvsteer_worker_sent_tokens_total",
        "kvsteer_store_blocks",
        "kvsteer_store_events_total",
    }
    assert METRICS - used_in("\n".join(exprs())) == unshown


def test_panels_do_not_overlap_and_have_distinct_names() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells
        assert max(x for x, _ in own) < 24
        cells |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["description"] for panel in panels())


@pytest.mark.slow
@needs_prometheus
def test_alerts_pass_their_unit_tests() -> None:
    command = ["promtool", "test", "rules", str(RULES.with_name("kvsteer.rules.test.yml"))]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


@needs_prometheus
def test_alerts_have_a_firing_and_a_silent_unit_test() -> None:
    tests = RULES.with_name("kvsteer.rules.test.yml").read_text()
    for alert in re.findall(r"- alert: (\w+)", RULES.read_text()):
        assert re.search(rf"alertname: {alert}, exp_alerts: \[\]", tests), alert
        assert re.search(rf"alertname: {alert}\n", tests), alert


async def talk(system: System) -> None:
    """Holds conversations whose follow-ups find their prefix."""
    for name in ("a", "b", "c"):
        body = chat(long_text(name))
        _, worker, _ = await system.send(body)
        await system.learned(body, worker)
        status, _, _ = await system.send(body)
        assert status == 200


async def shows(prometheus: Prometheus, expr: str) -> None:
    async def has_samples() -> bool:
        return bool(await prometheus.query(expr))

    await until(has_samples, f"samples of {expr}")


@pytest.mark.slow
@needs_prometheus
async def test_panels_show_data_of_a_running_system() -> None:
    accounting = {"accounting": {"responses": "usage"}}
    async with running(changes=accounting) as system:
        scraped = system.metrics.removeprefix("http://")
        async with running_prometheus(scraped, RULES.read_text()) as prometheus:
            await until(prometheus.is_up, "Prometheus answers")
            await shows(prometheus, 'up{job="kvsteer"} == 1')

            async def is_counted() -> bool:
                await talk(system)
                return bool(await prometheus.query("rate(kvsteer_responses_total[1m]) > 0"))

            await until(is_counted, "responses are counted")
            predictions = [one["predictions"] for one in await system.status()]
            assert sum(one["requests"] for one in predictions) > 0
            assert not any(one["causes"] for one in predictions)
            for asked in exprs():
                expr = asked.replace("$__rate_interval", "1m")  # as Grafana does
                await prometheus.query(expr)
                if not any(name in expr for name in ABSENT):
                    await shows(prometheus, expr)
            assert {rule["health"] for rule in (await prometheus.rules()).values()} == {"ok"}
            firing = await prometheus.query('ALERTS{alertstate="firing"}')
            assert firing == []


def impatient(rules: str) -> str:
    """The same rules, with 10 s in place of every number of minutes."""
    return re.sub(r"\b\d+m\b", "10s", rules)


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[tuple[System, Prometheus]]:
    """A system whose workers are probed, and a Prometheus with our alerts that scrapes it."""
    probed = {"policy": {"probe_interval_ms": 1000}}
    async with running(workers=2, changes=probed) as system:
        scraped = system.metrics.removeprefix("http://")
        async with running_prometheus(scraped, impatient(RULES.read_text())) as prometheus:
            await until(prometheus.is_up, "Prometheus answers")
            await shows(prometheus, "kvsteer_ready == 1")
            yield system, prometheus


async def fires(prometheus: Prometheus, alert: str, worker: str) -> None:
    named = f'alertname="{alert}", worker="{worker}"'
    await shows(prometheus, f'ALERTS{{alertstate="firing", {named}}}')


async def all_ended(prometheus: Prometheus) -> None:
    async def nothing_fires() -> bool:
        return not await prometheus.query('ALERTS{alertstate="firing"}')

    await until(nothing_fires, "no alert fires any more")


async def fired(prometheus: Prometheus) -> set[tuple[str, str]]:
    """Every alert that ever fired, and the worker that it named."""
    found = await prometheus.query('max_over_time(ALERTS{alertstate="firing"}[1h])')
    return {(one["metric"]["alertname"], one["metric"].get("worker", "")) for one in found}


async def feed_of(system: System, worker: SimulatedWorker) -> dict[str, Any]:
    told = {one["name"]: one for one in await system.status()}
    feed: dict[str, Any] = told[worker.endpoint]["feeds"][0]
    return feed


async def heals(system: System, worker: SimulatedWorker) -> None:
    async def is_live() -> bool:
        feed = await feed_of(system, worker)
        return (feed["state"], feed["reason"]) == ("live", "")

    await until(is_live, f"the feed of {worker.endpoint} is live again")


@pytest.mark.slow
@needs_prometheus
async def test_dead_worker_fires_its_alert_until_it_returns() -> None:
    async with watched() as (system, prometheus):
        dead = system.workers[0].endpoint
        await system.stop_worker(dead)
        await fires(prometheus, "KvsteerWorkerDown", dead)
        await system.start_worker(dead)
        await heals(system, system.workers[0])
        await all_ended(prometheus)
        assert await fired(prometheus) == {("KvsteerWorkerDown", dead)}


@pytest.mark.slow
@needs_prometheus
async def test_dead_feed_alone_fires_its_alert_until_it_returns() -> None:
    async with watched() as (system, prometheus):
        worker = system.workers[0]
        worker.faults.hide_events(hidden=True)
        await fires(prometheus, "KvsteerFeedNotLive", worker.endpoint)
        await system.serve(worker, long_text("while nobody is told"))
        worker.faults.hide_events(hidden=False)
        await heals(system, worker)
        await all_ended(prometheus)
        assert await fired(prometheus) == {("KvsteerFeedNotLive", worker.endpoint)}


@pytest.mark.slow
@needs_prometheus
async def test_dead_replay_socket_fires_its_alert_until_it_returns() -> None:
    async with watched() as (system, prometheus):
        worker = system.workers[0]
        worker.faults.hide_replay("absent")
        worker.faults.drop(1)
        for seed in ("a batch that is lost", "the batch that tells"):
            await system.serve(worker, long_text(seed))
        await fires(prometheus, "KvsteerReplayMissing", worker.endpoint)
        feed = await feed_of(system, worker)
        assert feed["last_sequence"] == worker.next_sequence() - 1  # the live stream goes on
        assert "replay failed" in feed["reason"]
        worker.faults.hide_replay(None)
        await heals(system, worker)
        await all_ended(prometheus)
        named = {name for name, _ in await fired(prometheus)}
        assert named <= {"KvsteerReplayMissing", "KvsteerFeedDegraded"}  # both are true
        assert {where for _, where in await fired(prometheus)} == {worker.endpoint}
