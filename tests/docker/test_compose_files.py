from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config.reader import load
from extproc.envoy_config import render

ROOT = Path(__file__).parents[2]


def services() -> dict[str, dict[str, Any]]:
    tree = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    found: dict[str, dict[str, Any]] = tree["services"]
    return found


def test_the_committed_envoy_yaml_is_what_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rendered = render(load("deploy/compose/kvsteer.yaml"))
    assert (ROOT / "deploy/compose/envoy.yaml").read_text() == rendered


@pytest.mark.parametrize("name", services())
def test_a_container_may_write_nothing_and_has_no_privileges(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", services())
def test_ports_are_published_on_loopback_only(name: str) -> None:
    ports = services()[name].get("ports", [])
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_no_configured_worker_is_missing_from_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    workers = load("deploy/compose/kvsteer.yaml").workers
    hosts = {worker.endpoint.partition(":")[0] for worker in workers}
    assert hosts == {name for name in services() if name.startswith("worker-")}


def test_nothing_in_the_dockerfile_needs_more_than_the_legacy_builder() -> None:
    lines = (ROOT / "deploy/Dockerfile").read_text().splitlines()
    needing = ("# syntax", "RUN --mount", "COPY --link", "COPY --chmod")
    assert [line for line in lines if line.startswith(needing)] == []
