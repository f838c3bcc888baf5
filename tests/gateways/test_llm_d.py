"""The router in the place of llm-d's picker, behind the Envoy of llm-d's own chart."""

import io
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from extproc.config.reader import parse
from tests.gateways.gateways import MODEL, behind
from tests.gateways.llm_d import FOLDER, configuration, running
from tests.system.system import CHAT, System, chat, long_text
from tests.waiting import until

WORKERS = {"decode_tokens_per_second": 20.0, "max_model_len_tokens": 400_000, "blocks": 25_000}
LONG_PROMPT = "word " * 300_000

behind_envoy = pytest.mark.slow


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with behind(tmp_path, running, configuration(), **WORKERS) as one:
        yield one


@behind_envoy
async def test_follow_up_reaches_the_holder_whatever_its_client_sends(system: System) -> None:
    body = chat(long_text("alpha"), model=MODEL)
    _, holder, _ = await system.send(body)
    await system.learned(body, holder)
    other = next(one.endpoint for one in system.workers if one.endpoint != holder)
    headers = {"x-gateway-destination-endpoint": other}
    answers = [await system.send(body, headers=headers) for _ in range(6)]
    assert {(status, worker) for status, worker, _ in answers} == {(200, holder)}


@behind_envoy
async def test_body_above_the_listener_buffer_passes(system: System) -> None:
    body = io.BytesIO(json.dumps(chat(LONG_PROMPT, model=MODEL)).encode())
    async with system.session.post(f"{system.envoy}{CHAT}", data=body) as response:
        assert response.status == 200, await response.text()


@behind_envoy
async def test_streamed_answer_is_in_flight_until_it_ends(system: System) -> None:
    body = chat(long_text("alpha"), model=MODEL, stream=True) | {"max_tokens": 200}
    async with system.session.post(f"{system.envoy}{CHAT}", json=body) as response:
        await response.content.readany()
        await until(lambda: system.in_flight(1), "one in flight")
        response.close()
    await until(lambda: system.in_flight(0), "none in flight after the client left")


@behind_envoy
async def test_dead_worker_fails_its_requests_and_no_others(system: System) -> None:
    body = chat(long_text("alpha"), model=MODEL)
    _, holder, _ = await system.send(body)
    await system.learned(body, holder)
    await system.stop_worker(holder)
    assert (await system.send(body))[0] == 503

    async def answered() -> bool:
        return (await system.send(body))[0] == 200

    await until(answered, "others answer")


@behind_envoy
async def test_envoy_without_a_router_answers_500_and_lets_a_client_choose(
    system: System,
) -> None:
    await system.stop_router()
    body = chat(long_text("alpha"), model=MODEL)
    assert (await system.send(body))[0] == 500
    worker = system.workers[0].endpoint
    headers = {"x-gateway-destination-endpoint": worker}
    url = f"{system.envoy}/v1/models"
    async with system.session.get(url, headers=headers) as response:
        assert (response.status, response.headers["x-worker"]) == (200, worker)
    async with system.session.get(url) as response:
        assert response.status == 503


def test_chart_values_hold_a_valid_configuration() -> None:
    values = yaml.safe_load((FOLDER / "values.yaml").read_text())["router"]["epp"]
    config = parse(values["pluginsCustomConfig"][values["pluginsConfigFile"]], "values.yaml")
    assert config.extproc.dialect == "epp"
    assert config.metrics.listen.endswith(":9090")
    assert config.discovery.kubernetes is not None


def test_patch_replaces_arguments_and_probes_of_the_deployment(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl (on Debian: the package kubernetes-client)")
    probe = {"grpc": {"port": 9003, "service": "inference-extension"}, "periodSeconds": 2}
    epp = {
        "name": "epp",
        "image": "kvsteer",
        "args": ["--pool-name", "my-model", "--grpc-health-port", "9003"],
        "ports": [{"name": "metrics", "containerPort": 9090}],
        "livenessProbe": probe,
        "readinessProbe": probe,
    }
    proxy = {"name": "envoy-proxy", "image": "envoy", "args": ["-c", "/etc/envoy/envoy.yaml"]}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [proxy, epp]}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "my-model-epp"},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template},
    }
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(deployment))
    command = ["kubectl", "patch", "--local", "-f", str(file), "--type", "strategic"]
    command += ["--patch-file", str(FOLDER / "patch.yaml"), "-o", "yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    patched_epp, patched_proxy = sorted(
        yaml.safe_load(done.stdout)["spec"]["template"]["spec"]["containers"],
        key=lambda one: str(one["name"] != "epp"),
    )
    assert patched_proxy == proxy
    assert patched_epp["args"] == ["serve", "--config", "/config/kvsteer.yaml"]
    for name in ("livenessProbe", "readinessProbe"):
        assert "grpc" not in patched_epp[name]
        assert patched_epp[name]["httpGet"]["port"] == "metrics"
