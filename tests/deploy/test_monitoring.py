"""The dashboard and the alerts, run by a real Prometheus on what a real system shows."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.prometheus_process import Prometheus, needs_prometheus, running_prometheus
from tests.e2e.system import System, chat, long_text, running, until

ROOT = Path(__file__).resolve().parent.parent.parent
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "kvsteer.json").read_text())
RULES = ROOT / "deploy" / "prometheus" / "kvsteer.rules.yml"
METRICS = set(
    re.findall(r"^\| `(kvsteer_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
)

# What a small system in which all is well does not show.
ABSENT = (
    "kind!~",
    "kvsteer_answered_elsewhere_total",
    "kvsteer_connection_faults_total",
    "kvsteer_discovery_",
    "kvsteer_prediction_drifts_total",
    "kvsteer_remote_tokenizer",
    "kvsteer_tls_",
    "kvsteer_worker_report_age_seconds",
)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def exprs() -> list[str]:
    """What the panels ask, as Grafana would ask it for all of everything."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [re.sub(r"\$(instance|model|worker)", ".*", one) for one in found]


def used_in(expr: str) -> set[str]:
    return {re.sub(r"_bucket$", "", name) for name in re.findall(r"kvsteer_\w+", expr)}


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_there_are() -> None:
    rules = "\n".join(re.findall(r"expr: (.*?)\n    (?:for|labels):", RULES.read_text(), re.DOTALL))
    assert used_in("\n".join(exprs())) <= METRICS
    assert used_in(rules) <= METRICS


def test_the_dashboard_shows_every_metric() -> None:
    assert METRICS - used_in("\n".join(exprs())) == {"kvsteer_worker_block_size_tokens"}


def test_panels_lie_side_by_side_and_have_names_of_their_own() -> None:
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


@needs_prometheus
def test_the_alerts_pass_their_unit_tests() -> None:
    command = ["promtool", "test", "rules", str(RULES.with_name("kvsteer.rules.test.yml"))]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


@needs_prometheus
def test_every_alert_has_a_unit_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    tests = RULES.with_name("kvsteer.rules.test.yml").read_text()
    for alert in re.findall(r"- alert: (\w+)", RULES.read_text()):
        assert re.search(rf"alertname: {alert}, exp_alerts: \[\]", tests), alert
        assert re.search(rf"alertname: {alert}\n", tests), alert


async def talk(system: System) -> None:
    """Conversations whose follow-ups find their prefix."""
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
async def test_every_panel_shows_something_of_a_running_system() -> None:
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
            for expr in exprs():
                expr = expr.replace("$__rate_interval", "1m")  # noqa: PLW2901
                await prometheus.query(expr)
                if not any(name in expr for name in ABSENT):
                    await shows(prometheus, expr)
            assert {rule["health"] for rule in (await prometheus.rules()).values()} == {"ok"}
            firing = await prometheus.query('ALERTS{alertstate="firing"}')
            assert firing == []


@pytest.mark.slow
@needs_prometheus
async def test_a_worker_that_dies_is_named_by_its_alert() -> None:
    impatient = re.sub(r"for: \d+m", "for: 1s", RULES.read_text())
    async with running() as system:
        scraped = system.metrics.removeprefix("http://")
        async with running_prometheus(scraped, impatient) as prometheus:
            await until(prometheus.is_up, "Prometheus answers")
            await shows(prometheus, "kvsteer_ready == 1")
            dead = system.workers[0].endpoint
            await system.stop_worker(dead)
            name = "KvsteerFeedNotLive"
            firing = f'ALERTS{{alertname="{name}", alertstate="firing", worker="{dead}"}}'
            await shows(prometheus, firing)
