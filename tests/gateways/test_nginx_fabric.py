"""NGINX Gateway Fabric in front of a router that is configured as its overlay says.

It sends its picker neither method nor path, ends the stream with the pick and takes one endpoint.
"""

import io
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.gateways.gateways import MODEL, behind
from tests.gateways.nginx_fabric import RELEASE, configuration, directives, missing, running
from tests.system.system import CHAT, System, all_answer, chat, long_text
from tests.waiting import until

pytestmark = [
    pytest.mark.gateway,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

STEERED = 'kvsteer_decisions_total{model="my-model",reason="overlap"}'
ASKED = "kvsteer_decision_seconds_count"
WORKERS = {"decode_tokens_per_second": 20.0, "max_model_len_tokens": 400_000, "blocks": 25_000}


def fabric(tmp_path: Path, more: str) -> AbstractAsyncContextManager[System]:
    return behind(tmp_path, partial(running, more), configuration(), **WORKERS)


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with fabric(tmp_path, directives()) as one:
        yield one


async def held(system: System) -> tuple[dict[str, object], str]:
    """A request whose prompt one worker is known to hold."""
    body = chat(long_text("alpha"), model=MODEL)
    status, holder, _ = await system.send(body)
    assert status == 200
    await system.learned(body, holder)
    return body, holder


async def test_follow_up_reaches_the_holder_whatever_its_client_sends(
    system: System, ran: Callable[[str], None]
) -> None:
    body, holder = await held(system)
    other = next(one.endpoint for one in system.workers if one.endpoint != holder)
    headers = {"x-gateway-destination-endpoint": other}
    answers = [await system.send(body, headers=headers) for _ in range(6)]
    assert {(status, worker) for status, worker, _ in answers} == {(200, holder)}
    assert await system.metric(STEERED) == 6
    ran(f"NGINX Gateway Fabric {RELEASE}, its nginx, script and shim: steered")


async def test_requests_without_a_router_are_answered_and_no_client_steers(system: System) -> None:
    await system.stop_router()
    headers = {"x-gateway-destination-endpoint": system.workers[0].endpoint}
    body = chat(long_text("alpha"), model=MODEL)
    workers = [one.endpoint for one in system.workers]
    await all_answer(lambda: system.send(body, headers=headers), workers)


async def test_tokens_arrive_as_they_are_generated(system: System) -> None:
    body = chat(long_text("alpha"), model=MODEL, stream=True) | {"max_tokens": 60}
    async with system.session.post(f"{system.envoy}{CHAT}", json=body) as response:
        assert response.status == 200
        pieces = [piece async for piece in response.content.iter_any()]
    assert pieces[-1].rstrip().endswith(b"data: [DONE]")
    # 60 tokens of some 220 bytes each: buffered by nginx, these would be four pieces
    assert len(pieces) > 20


async def test_request_waits_for_a_hanging_router_and_is_answered(system: System) -> None:
    assert system.router is not None
    system.router.send_signal(signal.SIGSTOP)
    try:
        body = chat(long_text("alpha"), model=MODEL)
        assert (await system.send(body))[0] == 200
    finally:
        system.router.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("words", [3_000, 200_000])
async def test_long_prompts_are_steered_with_the_policies_of_the_overlay(
    system: System, words: int
) -> None:
    body = chat("word " * words, model=MODEL)
    _, holder, _ = await system.send(body)
    await system.learned(body, holder)
    assert (await system.send(body))[:2] == (200, holder)
    assert await system.metric(STEERED) == 1


async def test_picker_gets_no_long_prompt_without_the_policies(tmp_path: Path) -> None:
    async with fabric(tmp_path, "") as system:
        assert (await system.send(chat("word " * 3_000, model=MODEL)))[0] == 200
        assert await system.metric(ASKED) == 0
        large = io.BytesIO(json.dumps(chat("word " * 230_000, model=MODEL)).encode())
        async with system.session.post(f"{system.envoy}{CHAT}", data=large) as response:
            assert response.status == 413


async def test_dead_workers_get_no_request_once_their_scrapes_fail(system: System) -> None:
    _, holder = await held(system)
    dead = [one.endpoint for one in system.workers if one.endpoint != holder]
    for endpoint in dead:
        await system.kill_worker(endpoint)

    async def missed() -> bool:
        down = [await system.metric(f'kvsteer_worker_down{{worker="{one}"}}') for one in dead]
        return down == [1, 1]

    await until(missed, "scrapes of the dead fail")
    answers = [
        await system.send(chat(long_text(f"beta {number}"), model=MODEL)) for number in range(10)
    ]
    assert {(status, worker) for status, worker, _ in answers} == {(200, holder)}


async def test_request_without_a_body_is_answered_unsteered(system: System) -> None:
    async with system.session.get(f"{system.envoy}/v1/models") as response:
        assert response.status == 200
    assert await system.metric(ASKED) == 0
