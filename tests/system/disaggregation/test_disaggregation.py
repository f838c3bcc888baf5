"""Prompts computed on one worker and answered by another, behind a real Envoy without a sidecar."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession, web

from kvtools.simulator.worker import SimulatedWorker
from tests.ports import free_port
from tests.system.system import CHAT, PROBED, System, chat, long_text, running
from tests.waiting import until

SGLANG = {"mode": "mirror", "connector": "sglang"}
VLLM = {
    "mode": "mirror",
    "connector": "offloading",
    "min_uncached_tokens": 32,
    "interference_percent": 1_000,
}
# For how long a half waits for the other one: where it may never come, and where it has to.
TIMEOUT_SECONDS, LONG_TIMEOUT_SECONDS = 3.0, 30.0


def of(system: System, role: str) -> list[SimulatedWorker]:
    return [worker for worker in system.workers if worker.settings.role == role]


def halves(system: System) -> tuple[int, int]:
    """How many halves of requests were finished, and how many were left without the other half."""
    done = sum(worker.transfer.finished for worker in system.workers)
    return done, sum(worker.transfer.timeouts for worker in system.workers)


def queried(worker: SimulatedWorker) -> int:
    return sum(rank.engine.counters.queried_tokens for rank in worker.ranks)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def two_and_two(timeout_seconds: float, **changes: Any) -> AsyncIterator[System]:
    roles = ("prefill", "prefill", "decode", "decode")
    changes["disaggregation"] = SGLANG
    async with running(
        roles=roles,
        changes=changes,
        dialect="sglang-0.5.22",
        transfer_timeout_seconds=timeout_seconds,
    ) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sglang() -> AsyncIterator[System]:
    """For tests that leave the system as it was; each has its own prompts."""
    async with two_and_two(LONG_TIMEOUT_SECONDS) as one:
        yield one


async def test_sglang_request_is_computed_by_two_workers_without_a_sidecar(sglang: System) -> None:
    decoding = {worker.endpoint for worker in of(sglang, "decode")}
    bodies = [chat(long_text(f"request {number}")) for number in range(8)]
    done, _ = halves(sglang)
    answers = [await sglang.send(body) for body in bodies]
    assert {status for status, _, _ in answers} == {200}, answers
    assert {worker for _, worker, _ in answers} <= decoding
    assert halves(sglang) == (done + 16, 0)

    async def both_compute() -> bool:  # chance decides which one, since they cost the same
        await sglang.send(chat(long_text(f"request {next(numbers)}")))
        return all(queried(worker) for worker in of(sglang, "prefill"))

    numbers = itertools.count(8)
    await until(both_compute, "both prefill workers compute prompts")


async def test_follow_up_is_prefilled_by_the_worker_that_holds_its_prefix(sglang: System) -> None:
    body = chat(long_text("alpha"))
    before = {one.endpoint: queried(one) for one in of(sglang, "prefill")}
    await sglang.send(body)
    (held,) = (one.endpoint for one in of(sglang, "prefill") if queried(one) > before[one.endpoint])

    async def would_return() -> bool:
        return bool((await sglang.explain(body))["prefill"]["pick"] == held)

    await until(would_return, "a decision that knows its prefix, by the worker's events")
    before = {one.endpoint: queried(one) for one in of(sglang, "prefill")}
    await until(lambda: sglang.in_flight(0), "none in flight")
    for number in range(4):
        assert (await sglang.send(chat(long_text("alpha") + f" And {number}?")))[0] == 200
    after = {one.endpoint: queried(one) for one in of(sglang, "prefill")}
    assert {name for name in after if after[name] > before[name]} == {held}


async def test_bootstrap_fields_of_a_client_are_never_obeyed(sglang: System) -> None:
    theirs: dict[str, Any] = {
        "bootstrap_host": "10.9.9.9",
        "bootstrap_port": 1,
        "bootstrap_room": 7,
    }
    assert (await sglang.send(chat(long_text("theirs"), **theirs)))[0] == 200
    hidden = json.dumps({**chat(long_text("hidden")), **theirs}).encode("utf-16")
    async with sglang.session.post(
        f"{sglang.envoy}{CHAT}", data=hidden, headers={"content-type": "application/json"}
    ) as response:
        assert response.status == 200


async def test_dead_prefill_worker_is_detected_and_left_out() -> None:
    async with two_and_two(TIMEOUT_SECONDS, **PROBED) as system:
        dead = of(system, "prefill")[0].endpoint
        await system.stop_worker(dead)

        async def left_out() -> bool:
            await system.send(chat(long_text("probe")))
            return any(one["down"] for one in await system.status() if one["endpoint"] == dead)

        await until(left_out, "the dead prefill worker is known")
        answers = await asyncio.gather(*(system.send(chat(long_text(str(n)))) for n in range(12)))
        assert {status for status, _, _ in answers} == {200}


async def test_requests_without_a_router_reach_only_workers_of_both_roles() -> None:
    roles = ("prefill", "decode", "decode", "decode", "both")
    changes: dict[str, Any] = {"disaggregation": SGLANG}
    async with running(roles=roles, changes=changes, dialect="sglang-0.5.22") as system:
        await system.stop_router()
        (whole,) = of(system, "both")
        answers = [await system.send(chat(f"number {number}")) for number in range(8)]
        assert {answer[:2] for answer in answers} == {(200, whole.endpoint)}


async def test_vllm_workers_get_one_half_of_a_body_each() -> None:
    changes = {"disaggregation": VLLM}
    async with running(
        roles=("prefill", "decode"), changes=changes, decode_tokens_per_second=20.0
    ) as system:
        (prefill,), (decode,) = of(system, "prefill"), of(system, "decode")
        # two answers that outlast the test, and that a prompt computed there would delay
        others = [
            asyncio.create_task(system.send(chat(f"short {n}") | {"max_tokens": 10_000}))
            for n in range(2)
        ]

        async def are_under_way() -> bool:
            assert not [other.result() for other in others if other.done()]
            return await system.in_flight(2)

        await until(are_under_way, "two in flight")
        body = chat(long_text("alpha"), stream=True, stream_options={"include_usage": True})
        status, worker, answer = await system.send(body | {"max_tokens": 12})
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert (status, worker) == (200, decode.endpoint)
        assert answer["text"].count("data: ") == 12 + 3  # the role, the usage, the end
        assert halves(system) == (2, 0)
        assert queried(prefill) > 100
        await system.learned(chat(long_text("alpha")), decode.endpoint)


async def test_long_body_reaches_both_workers_whole() -> None:
    changes = {"disaggregation": SGLANG}
    async with running(
        roles=("prefill", "decode"),
        changes=changes,
        dialect="sglang-0.5.22",
        max_model_len_tokens=200_000,
        blocks=16_384,
        transfer_timeout_seconds=LONG_TIMEOUT_SECONDS,
    ) as system:
        body = chat("word " * 60_000)
        assert len(json.dumps(body)) > 300_000
        status, worker, _ = await system.send(body)
        assert (status, worker) == (200, of(system, "decode")[0].endpoint)
        assert halves(system) == (2, 0)
        assert queried(of(system, "prefill")[0]) > 50_000


class Sidecar:
    """Stands in front of a decode worker as llm-d's does, for vLLM's OffloadingConnector.

    named: x-prefiller-host-port of each request, None where it had none.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.named: list[str | None] = []
        self.decode = ""
        self.transfer_port = 0

    async def serve(self, request: web.Request) -> web.Response:
        body = await request.json()
        named = request.headers.get("x-prefiller-host-port")
        self.named.append(named)
        if named is None:
            return await self.send(self.decode, body)
        number = {"kv_request_id": str(len(self.named))}
        place = {"remote_host": "127.0.0.1", "remote_port": self.transfer_port}
        first = {"kv_transfer_params": {"remote_decoder": number}, "max_tokens": 1}
        second = {"kv_transfer_params": {"remote_prefiller": number | place}}
        legs = (self.send(named, body | first), self.send(self.decode, body | second))
        return (await asyncio.gather(*legs))[1]

    async def send(self, endpoint: str, body: dict[str, Any]) -> web.Response:
        url = f"http://{endpoint}{CHAT}"
        async with ClientSession() as session, session.post(url, json=body) as answer:
            told = {"x-worker": answer.headers["x-worker"], "content-type": "application/json"}
            return web.Response(body=await answer.read(), status=answer.status, headers=told)


@pytest_asyncio.fixture(loop_scope="module")
async def sidecar() -> AsyncIterator[Sidecar]:
    port = free_port()
    one = Sidecar(f"127.0.0.1:{port}")
    application = web.Application()
    application.add_routes([web.post(CHAT, one.serve)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield one
    await runner.cleanup()


async def test_sidecar_has_the_named_worker_compute_the_prompt(sidecar: Sidecar) -> None:
    rules = VLLM | {"mode": "header", "interference_percent": 100_000}

    def proxied(worker: SimulatedWorker) -> str:
        return sidecar.address if worker.settings.role == "decode" else worker.endpoint

    async with running(
        roles=("prefill", "decode"),
        changes={"disaggregation": rules},
        proxied=proxied,
        decode_tokens_per_second=20.0,
    ) as system:
        (prefill,), (decode,) = of(system, "prefill"), of(system, "decode")
        sidecar.decode = decode.endpoint
        told = prefill.settings.transfer_listen or ""
        sidecar.transfer_port = int(told.rpartition(":")[2])
        theirs = {"x-prefiller-host-port": "10.9.9.9:1"}
        assert (await system.send(chat("short"), headers=theirs))[0] == 200
        await until(lambda: system.in_flight(0), "none in flight")
        other = asyncio.create_task(system.send(chat("short too") | {"max_tokens": 10_000}))
        await until(lambda: len(sidecar.named) == 2, "it is at the sidecar")
        await until(lambda: system.in_flight(1), "one in flight")
        answer = await system.send(chat(long_text("alpha")), headers=theirs)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        assert answer[:2] == (200, decode.endpoint)
        assert sidecar.named == [None, None, prefill.endpoint]
        assert halves(system) == (2, 0)


@pytest.mark.slow
async def test_killed_halves_lose_only_requests_under_way() -> None:
    roles = ("prefill", "prefill", "decode", "decode", "both")
    changes = {"disaggregation": SGLANG, **PROBED}
    failed: list[tuple[float, float]] = []  # when they began and ended
    unknown: list[tuple[float, float]] = []  # from each kill until the router was seen to know it
    numbers = itertools.count()
    stop = asyncio.Event()

    async with running(
        roles=roles,
        changes=changes,
        dialect="sglang-0.5.22",
        transfer_timeout_seconds=TIMEOUT_SECONDS,
    ) as system:
        begun = 0

        async def client() -> None:
            nonlocal begun
            while not stop.is_set():
                began = time.monotonic()
                begun += 1
                body = chat(long_text(f"number {next(numbers) % 100}"))
                if (await system.send(body))[0] != 200:
                    failed.append((began, time.monotonic()))

        async def is_known(endpoint: str) -> bool:
            return any(one["down"] for one in await system.status() if one["endpoint"] == endpoint)

        def have_begun(count: int) -> bool:
            return begun >= count

        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(client()) for _ in range(4)]
            for worker in (*of(system, "prefill"), *of(system, "decode")):
                killed_at = time.monotonic()
                await system.stop_worker(worker.endpoint)
                await until(partial(is_known, worker.endpoint), "the dead worker is known")
                unknown.append((killed_at, time.monotonic()))
                await until(partial(have_begun, begun + 40), "requests went on without it")
                await system.start_worker(worker.endpoint)
            stop.set()
            await asyncio.gather(*clients)
        late = [
            (began, ended)
            for began, ended in failed
            if not any(began <= known_at and killed_at <= ended for killed_at, known_at in unknown)
        ]
        assert not late, "a request that began when the death was known failed"
        await until(lambda: system.in_flight(0), "none in flight")

        async def without_rooms() -> bool:
            return not any(worker.transfer.waiting for worker in system.workers)

        await until(without_rooms, "no half waits for a partner")
