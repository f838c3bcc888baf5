"""The manifests for Istio's EnvoyFilter and for Envoy Gateway steer a real Envoy."""

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.system.ingresses.existing_envoy import behind
from tests.system.ingresses.ingresses import envoy_gateway, istio
from tests.system.system import CHAT, System, all_answer, chat, long_text
from tests.waiting import until

pytestmark = pytest.mark.slow

INGRESSES = {"istio-envoyfilter": istio, "envoy-gateway": envoy_gateway}
# Above both the default of Envoy Gateway, 32 KiB, and that of Envoy, 1 MiB.
LONG_PROMPT = "word " * 300_000


@pytest.fixture(params=INGRESSES)
async def system(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[System]:
    workers = {"decode_tokens_per_second": 20.0, "max_model_len_tokens": 400_000, "blocks": 25_000}
    async with behind(tmp_path, INGRESSES[request.param], **workers) as one:
        await one.start_router()
        yield one


async def test_request_is_steered_against_the_header_of_its_client(system: System) -> None:
    body = chat(long_text("alpha"), model="my-model")
    _, holder, _ = await system.send(body)
    await system.learned(body, holder)
    other = next(one.endpoint for one in system.workers if one.endpoint != holder)
    headers = {"x-gateway-destination-endpoint": other}
    answers = [await system.send(body, headers=headers) for _ in range(5)]
    assert {(status, worker) for status, worker, _ in answers} == {(200, holder)}


async def test_requests_without_a_router_are_answered_and_no_client_steers(system: System) -> None:
    await system.stop_router()
    headers = {"x-gateway-destination-endpoint": system.workers[0].endpoint}
    body = chat(long_text("alpha"), model="my-model")
    workers = [one.endpoint for one in system.workers]
    await all_answer(lambda: system.send(body, headers=headers), workers)


async def test_request_is_in_flight_until_its_response_ends(system: System) -> None:
    body = chat(long_text("alpha"), model="my-model", stream=True) | {"max_tokens": 200}
    async with system.session.post(f"{system.envoy}{CHAT}", json=body) as response:
        await response.content.readany()
        await until(lambda: system.in_flight(1), "one in flight")
        response.close()
    await until(lambda: system.in_flight(0), "none in flight after the client left")


async def test_long_prompt_is_answered(system: System) -> None:
    body = io.BytesIO(json.dumps(chat(LONG_PROMPT, model="my-model")).encode())
    headers = {"content-type": "application/json"}
    url = f"{system.envoy}{CHAT}"
    async with system.session.post(url, data=body, headers=headers) as response:
        assert response.status == 200, await response.text()


async def test_dead_worker_loses_no_request(system: System) -> None:
    body = chat(long_text("alpha"), model="my-model")
    _, holder, _ = await system.send(body)
    await system.learned(body, holder)
    await system.stop_worker(holder)
    answers = [await system.send(body) for _ in range(5)]
    assert {status for status, _, _ in answers} == {200}
    assert holder not in {worker for _, worker, _ in answers}
