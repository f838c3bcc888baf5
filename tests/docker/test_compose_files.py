import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config.reader import load

ROOT = Path(__file__).parents[2]


class Compose(yaml.SafeLoader):
    """Reads a mapping with one of compose's own tags as a mapping, anything else as None."""


def _marked(loader: Compose, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return None


Compose.add_multi_constructor("!", _marked)


def composed(file: str = "docker-compose.yml") -> dict[str, Any]:
    tree: dict[str, Any] = yaml.load((ROOT / file).read_text(), Compose)  # noqa: S506 - a SafeLoader
    return tree


def services(file: str = "docker-compose.yml") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = composed(file)["services"]
    return found


def bind_mounts(file: str) -> list[str]:
    """What a compose file mounts from this directory, relative to it."""
    volumes = [one for service in services(file).values() if service for one in volumes_of(service)]
    return [one.partition(":")[0] for one in volumes if one.startswith("./")]


def volumes_of(service: dict[str, Any]) -> list[str]:
    found: list[str] = service.get("volumes", [])
    return found


def image_of(service: dict[str, Any]) -> str:
    """The image that its variable names, or else the one that the compose file names."""
    name, _, usual = str(service["image"]).removeprefix("${").rstrip("}").partition(":-")
    return os.environ.get(name, usual)


def test_scale_profile_routers_meet_at_the_engine_and_are_found_by_envoy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    config = load("deploy/compose/scale/kvsteer.yaml")
    assert config.sharing is not None
    assert config.sharing.url == "valkey://valkey:6379"
    found = services()
    names = {name for name, service in found.items() if service.get("profiles") == ["scale"]}
    assert names == {"valkey", "router", "envoy-scale"}
    assert found["router"]["scale"] == 2
    assert config.router_addresses() == ("router:9002",)
    assert config.workers == load("deploy/compose/kvsteer.yaml").workers
    assert "STRICT_DNS" in (ROOT / "deploy/compose/scale/envoy.yaml").read_text()


@pytest.mark.parametrize("file", ["compose", "compose/gpu"])
def test_envoy_and_router_share_the_sockets_volume_and_one_user(
    file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(ROOT / "kvtools/simulator/tiny_model")
    (tmp_path / "kvtools").symlink_to(ROOT / "kvtools")
    monkeypatch.chdir(tmp_path)
    listen = load(str(ROOT / f"deploy/{file}/kvsteer.yaml")).extproc.listen
    for name in ("envoy", "kvsteer"):
        assert "sockets:/run/kvsteer" in volumes_of(services()[name])
    assert listen == "unix:/run/kvsteer/extproc.sock"
    assert listen in services()["kvsteer"]["healthcheck"]["test"]
    user, _, _ = services()["envoy"]["user"].partition(":")
    assert f"USER {user}:" in (ROOT / "deploy/Dockerfile").read_text()
    options = composed()["volumes"]["sockets"]["driver_opts"]["o"]
    assert f"uid={user},gid={user},mode=0700" in options


@pytest.mark.parametrize("name", services())
def test_containers_are_read_only_and_have_no_privileges(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", services())
def test_published_ports_are_on_loopback(name: str) -> None:
    ports = services()[name].get("ports", [])
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_configured_workers_are_all_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    workers = load("deploy/compose/kvsteer.yaml").workers
    hosts = {worker.endpoint.partition(":")[0] for worker in workers}
    assert hosts == {name for name in services() if name.startswith("worker-")}


def test_engine_publishes_where_the_router_listens() -> None:
    router = yaml.safe_load((ROOT / "deploy/compose/gpu/kvsteer.yaml").read_text())
    engines = services("docker-compose.gpu.yml")
    for worker in router["workers"]:
        command = engines[worker["endpoint"].partition(":")[0]]["command"]
        (given,) = [one for one in command if one.startswith("--kv-events-config=")]
        published = json.loads(given.partition("=")[2])
        for ours, theirs in (("zmq", "endpoint"), ("replay", "replay_endpoint")):
            port = worker["events"][ours].rpartition(":")[2]
            assert published[theirs] == f"tcp://*:{port}"


def test_prometheus_scrapes_every_service_that_has_metrics() -> None:
    tree = yaml.safe_load((ROOT / "deploy/compose/prometheus.yml").read_text())
    targets = [
        target.partition(":")[0]
        for job in tree["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    ]
    scale = {"valkey", "router", "envoy-scale"}
    assert set(targets) == set(services()) - {"prometheus", "grafana"} - scale


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_mounted_files_all_exist(file: str) -> None:
    assert [one for one in bind_mounts(file) if not (ROOT / one).exists()] == []


def test_dockerfile_needs_only_the_legacy_builder() -> None:
    lines = (ROOT / "deploy/Dockerfile").read_text().splitlines()
    needing = ("# syntax", "RUN --mount", "COPY --link", "COPY --chmod")
    assert [line for line in lines if line.startswith(needing)] == []


def test_dockerfile_copies_only_existing_files_that_are_not_ignored() -> None:
    lines = (ROOT / "deploy/Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    copied = {name for names in copies for name in names if not names[0].startswith("--from")}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert [name for name in copied if not (ROOT / name).exists()] == []
