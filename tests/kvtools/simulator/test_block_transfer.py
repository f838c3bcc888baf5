"""A prompt computed by one simulated worker and answered by another, as SGLang and vLLM do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import pytest

from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings
from kvtools.simulator.worker import SimulatedWorker
from tests.ports import free_port
from tests.waiting import until

WORDS = {"model": "tiny", "prompt": "word " * 200, "max_tokens": 3}
SGLANG = "sglang-0.5.22"


class Pair(NamedTuple):
    prefill: SimulatedWorker
    decode: SimulatedWorker
    port: int
    session: aiohttp.ClientSession

    async def ask(self, worker: SimulatedWorker, **fields: Any) -> int:
        url = f"{worker.url}/v1/completions"
        async with self.session.post(url, json=WORDS | fields) as response:
            await response.read()
            return response.status

    def room(self, number: int = 7) -> dict[str, Any]:
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port}
        return place | {"bootstrap_room": number}


@asynccontextmanager
async def pair(dialect: str, **settings: Any) -> AsyncIterator[Pair]:
    port = free_port()
    async with AsyncExitStack() as stack:
        prefill = Settings(
            role="prefill", transfer_listen=f"127.0.0.1:{port}", dialect=dialect, **settings
        )
        decode = Settings(role="decode", dialect=dialect, **settings)
        yield Pair(
            await stack.enter_async_context(running(prefill)),
            await stack.enter_async_context(running(decode)),
            port,
            await stack.enter_async_context(aiohttp.ClientSession()),
        )


async def test_sglang_workers_meet_by_room_in_any_order() -> None:
    async with pair(SGLANG, prefill_tokens_per_second=100_000.0) as one:
        for first, second in ((one.prefill, one.decode), (one.decode, one.prefill)):
            waiting = asyncio.create_task(one.ask(first, **one.room()))
            await until(lambda: one.prefill.transfer.waiting == 1, "the first is there")
            assert (await one.ask(second, **one.room()), await waiting) == (200, 200)
        assert one.prefill.transfer.finished == one.decode.transfer.finished == 2


async def test_sglang_workers_refuse_a_request_without_a_room() -> None:
    async with pair(SGLANG) as one:
        assert [await one.ask(worker) for worker in (one.prefill, one.decode)] == [400, 400]


async def test_plain_worker_pulls_held_blocks_and_computes_the_rest() -> None:
    async with pair("vllm-0.32") as one:
        source = {"kv_request_id": "1", "remote_host": "127.0.0.1", "remote_port": one.port}
        named = {"kv_transfer_params": {"remote_kv_source": source}}
        assert await one.ask(one.decode, **named, cache_salt="other") == 200
        assert one.decode.transfer.pulled_tokens == 0  # nobody holds anything yet
        assert await one.ask(one.prefill) == 200
        assert await one.ask(one.decode, **named) == 200
        pulled = one.decode.transfer.pulled_tokens
        assert pulled > 100
        assert await one.ask(one.decode, **named) == 200
        assert one.decode.transfer.pulled_tokens == pulled
        nowhere = named | {"prompt": "x " * 50}
        source["remote_port"] = free_port()
        assert await one.ask(one.decode, **nowhere) == 200
        assert one.decode.transfer.pulled_tokens == pulled


async def test_half_without_its_partner_fails_at_its_time_limit() -> None:
    async with pair(SGLANG, transfer_timeout_seconds=0.2) as one:
        assert await one.ask(one.prefill, **one.room()) == 500
        assert await one.ask(one.decode, **one.room()) == 500
        nowhere = one.room() | {"bootstrap_port": free_port()}
        assert await one.ask(one.decode, **nowhere) == 500
        assert (one.prefill.transfer.timeouts, one.decode.transfer.timeouts) == (1, 2)


async def test_vllm_prefill_worker_keeps_its_blocks_and_both_announce_them() -> None:
    async with pair("vllm-0.32") as one:
        source = {"kv_request_id": "a", "remote_host": "127.0.0.1", "remote_port": one.port}
        first = {"kv_transfer_params": {"remote_decoder": {"kv_request_id": "a"}}}
        waiting = asyncio.create_task(one.ask(one.prefill, **first))
        await until(lambda: one.prefill.transfer.waiting == 1, "the first is there")
        second = {"kv_transfer_params": {"remote_prefiller": source}}
        assert (await one.ask(one.decode, **second), await waiting) == (200, 200)
        assert all(worker.next_sequence() for worker in (one.prefill, one.decode))
        assert await one.ask(one.decode) == 200  # a whole request


async def test_mooncake_workers_meet_by_transfer() -> None:
    async with pair("vllm-0.32") as one:
        place = {"transfer_id": "a", "remote_bootstrap_addr": f"http://127.0.0.1:{one.port}"}
        second = {"kv_transfer_params": {"do_remote_prefill": True, **place}}
        waiting = asyncio.create_task(one.ask(one.decode, **second))
        first = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "a"}}
        assert (await one.ask(one.prefill, **first), await waiting) == (200, 200)


@pytest.mark.parametrize("rate", [1_000.0])
async def test_transfer_takes_time_in_proportion(rate: float) -> None:
    async with pair(SGLANG, transfer_tokens_per_second=rate) as one:
        waiting = asyncio.create_task(one.ask(one.prefill, **one.room()))
        began = asyncio.get_running_loop().time()
        assert await one.ask(one.decode, **one.room()) == 200
        assert asyncio.get_running_loop().time() - began >= 190 / rate
        assert await waiting == 200


async def test_room_serves_one_request() -> None:
    async with pair(SGLANG) as one:
        both = [asyncio.create_task(one.ask(one.prefill, **one.room())) for _ in range(2)]
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result() for task in done} == {500}
        assert await one.ask(one.decode, **one.room()) == 200
        assert sorted(await asyncio.gather(*both)) == [200, 500]
