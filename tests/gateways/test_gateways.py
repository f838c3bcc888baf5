"""KVSteer behind gateways of other projects, as they are: what each does, and what it cannot do."""

import io
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gateways import envoy_gateway, istio
from tests.gateways.gateways import MODEL, Place, behind, published
from tests.gateways.install import PROGRAMS
from tests.system.system import CHAT, System, all_answer, chat, long_text
from tests.waiting import until

pytestmark = pytest.mark.gateway

Running = Callable[[Path, Place], AbstractAsyncContextManager[None]]


class Gateway(NamedTuple):
    """program: its name in tests/gateways/install.py. fails_open: answers without the router."""

    program: str
    overlay: str
    running: Running
    fails_open: bool


GATEWAYS = {
    "envoy-gateway": Gateway(
        "envoy-gateway", envoy_gateway.OVERLAY, envoy_gateway.running, fails_open=True
    ),
    "istio-envoyfilter": Gateway(
        "pilot-discovery",
        istio.ENVOY_FILTER,
        partial(istio.running, istio.ENVOY_FILTER),
        fails_open=True,
    ),
    "istio-inferencepool": Gateway(
        "pilot-discovery",
        istio.INFERENCE_POOL,
        partial(istio.running, istio.INFERENCE_POOL),
        fails_open=False,
    ),
}

# Above both the default of Envoy Gateway, 32 KiB, and that of Envoy, 1 MiB.
LONG_PROMPT = "word " * 300_000
WORKERS = {"decode_tokens_per_second": 20.0, "max_model_len_tokens": 400_000, "blocks": 25_000}


@pytest.fixture(params=GATEWAYS)
def gateway(request: pytest.FixtureRequest) -> Gateway:
    return GATEWAYS[request.param]


@pytest.fixture
async def system(
    request: pytest.FixtureRequest,
    gateway: Gateway,
    program: Callable[[str], Path],
    ran: Callable[[str], None],
    tmp_path: Path,
) -> AsyncIterator[System]:
    start = partial(gateway.running, program(gateway.program))
    async with behind(tmp_path, start, published(gateway.overlay), **WORKERS) as one:
        version = PROGRAMS[gateway.program].version
        ran(f"{gateway.program} {version}, {gateway.overlay}: {request.node.originalname}")
        yield one


async def held(system: System) -> tuple[dict[str, object], str]:
    """A prompt, and the worker that is known to hold it."""
    body = chat(long_text("alpha"), model=MODEL)
    status, holder, answer = await system.send(body)
    assert status == 200, answer
    await system.learned(body, holder)
    return body, holder


async def test_follow_up_reaches_the_holder_whatever_its_client_sends(system: System) -> None:
    body, holder = await held(system)
    other = next(one.endpoint for one in system.workers if one.endpoint != holder)
    headers = {"x-gateway-destination-endpoint": other}
    answers = [await system.send(body, headers=headers) for _ in range(5)]
    assert {(status, worker) for status, worker, _ in answers} == {(200, holder)}
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for *_, answer in answers]
    assert min(cached) > 0


async def test_streamed_answer_passes_piecewise_and_counts_until_its_end(
    system: System,
) -> None:
    body = chat(long_text("alpha"), model=MODEL, stream=True) | {"max_tokens": 200}
    async with system.session.post(f"{system.envoy}{CHAT}", json=body) as response:
        first = await response.content.readany()
        assert b"[DONE]" not in first
        await until(lambda: system.in_flight(1), "one in flight")
        response.close()
    await until(lambda: system.in_flight(0), "none in flight after the client left")


async def test_long_prompt_passes(system: System) -> None:
    body = io.BytesIO(json.dumps(chat(LONG_PROMPT, model=MODEL)).encode())
    headers = {"content-type": "application/json"}
    url = f"{system.envoy}{CHAT}"
    async with system.session.post(url, data=body, headers=headers) as response:
        assert response.status == 200, await response.text()


async def test_dead_workers_fail_no_request(system: System) -> None:
    body, holder = await held(system)
    other = next(one.endpoint for one in system.workers if one.endpoint != holder)
    await system.stop_worker(holder)
    await system.stop_worker(other)
    answers = [await system.send(body) for _ in range(10)]
    alive = {one.endpoint for one in system.workers} - {holder, other}
    assert {(status, worker) for status, worker, _ in answers} == {(200, *alive)}


async def test_client_cannot_steer_without_a_router(system: System, gateway: Gateway) -> None:
    await system.stop_router()
    headers = {"x-gateway-destination-endpoint": system.workers[0].endpoint}
    body = chat(long_text("alpha"), model=MODEL)
    if gateway.fails_open:
        workers = [one.endpoint for one in system.workers]
        await all_answer(lambda: system.send(body, headers=headers), workers)
    else:
        answers = [await system.send(body, headers=headers) for _ in range(3)]
        assert {status for status, *_ in answers} == {500}


@pytest.mark.parametrize(
    "gateway", [name for name, one in GATEWAYS.items() if one.fails_open], indirect=True
)
async def test_hanging_router_delays_requests_and_loses_none(system: System) -> None:
    assert system.router is not None
    system.router.send_signal(signal.SIGSTOP)
    try:
        body = chat(long_text("alpha"), model=MODEL)
        answers = [await system.send(body) for _ in range(3)]
    finally:
        system.router.send_signal(signal.SIGCONT)
    assert {status for status, *_ in answers} == {200}
