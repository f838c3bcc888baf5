"""Several data-parallel ranks behind one API, and publishers that connect."""

import asyncio
import contextlib
import re
import socket as tcp
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings, rank_endpoint
from tests.kvtools.simulator.readers import Client, complete, post, published, replay, store_block
from tests.waiting import until

PROMPT = range(100, 117)


async def on_rank(client: Client, rank: int, prompt: range = PROMPT) -> int:
    body = {"prompt": list(prompt), "max_tokens": 1}
    headers = {"X-data-parallel-rank": str(rank)}
    usage = (await post(client, "/v1/completions", body, **headers))["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def free_base(ports: int) -> int:
    """The first of some consecutive free ports."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(tcp.create_server(("127.0.0.1", 0)))
            base: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for port in range(base + 1, base + ports):
                    stack.enter_context(tcp.create_server(("127.0.0.1", port)))
                return base


async def test_ranks_have_a_cache_a_sequence_and_a_number_each() -> None:
    async with running(Settings(ranks=3)) as worker, Client(worker.url) as own:
        assert [await on_rank(own, rank) for rank in (1, 1, 2, 0)] == [0, 16, 0, 0]
        assert [worker.next_sequence(rank) for rank in range(3)] == [1, 1, 1]
        for rank in range(3):
            [message] = await replay(worker, 0, rank=rank)
            assert msgspec.msgpack.decode(message[-1])[2] == rank
            assert worker.held_prefix_tokens(PROMPT, rank=rank) == 16


async def test_vllm_announces_the_address_of_every_rank() -> None:
    async with running(Settings(ranks=2)) as worker, Client(worker.url) as own:
        sources = await (await own.get("/kv_event_sources")).json()
        assert [sources[rank]["endpoint"] for rank in "01"] == worker.events_endpoints
        assert [sources[rank]["replay_endpoint"] for rank in "01"] == worker.replay_endpoints
        assert worker.events_endpoint == worker.events_endpoints[0]
        assert worker.replay_endpoint == worker.replay_endpoints[0]


async def test_ports_count_up_by_rank() -> None:
    base = free_base(4)
    settings = Settings(
        dialect="sglang-0.5.22",
        ranks=2,
        events_endpoint=f"tcp://127.0.0.1:{base}",
        replay_endpoint=f"tcp://127.0.0.1:{base + 2}",
    )
    async with running(settings) as worker, Client(worker.url) as own:
        answer = (await (await own.get("/server_info")).json())["kv_events"]
        assert (answer["endpoint_port_base"], answer["dp_size"]) == (base, 2)
        assert [int(one.rpartition(":")[2]) for one in worker.events_endpoints] == [base, base + 1]
        assert await published(worker, rank=1) == [{"type": "AllBlocksCleared"}]


def test_rank_endpoint_adds_the_rank_to_a_port_and_keeps_0() -> None:
    assert rank_endpoint("tcp://*:5557", 2) == "tcp://*:5559"
    assert rank_endpoint("tcp://[::1]:0", 2) == "tcp://[::1]:0"
    assert rank_endpoint("ipc:///run/kv", 0) == "ipc:///run/kv"


async def test_request_without_a_rank_goes_to_the_least_busy() -> None:
    settings = Settings(ranks=2, decode_tokens_per_second=50)
    async with running(settings) as worker, Client(worker.url) as own:
        body = {"prompt": "a", "max_tokens": 1000}
        pinned = {"X-data-parallel-rank": "0"}
        first = asyncio.create_task(
            own.post("/v1/completions", json=body, headers=pinned).__aenter__()
        )
        await until(lambda: worker.ranks[0].engine.counters.running == 1)
        await store_block(own)
        assert [worker.next_sequence(rank) for rank in range(2)] == [0, 1]
        first.cancel()


@pytest.mark.parametrize("rank", ["2", "-1", "x", "", "²"])
async def test_unknown_rank_is_refused(rank: str) -> None:
    async with running(Settings(ranks=2)) as worker, Client(worker.url) as own:
        headers = {"X-data-parallel-rank": rank}
        response = await own.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert response.status == 400


async def test_metrics_add_up_the_ranks() -> None:
    async with running(Settings(ranks=2)) as worker, Client(worker.url) as own:
        for rank in (0, 1):
            await on_rank(own, rank)
        text = await (await own.get("/metrics")).text()
        assert re.search(r"^vllm:prefix_cache_queries_total\S* 34.0$", text, re.MULTILINE)


async def test_reset_reaches_every_rank() -> None:
    async with running(Settings(ranks=2)) as worker, Client(worker.url) as own:
        for rank in (0, 1):
            await on_rank(own, rank)
        assert await post(own, "/reset_prefix_cache", {}) == {"success": True}
        assert [await on_rank(own, rank) for rank in (0, 1)] == [0, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dialect": "vllm-1"}, "no dialect 'vllm-1'; there are vllm-0.9, "),
        ({"bigrams": True}, "only SGLang has bigrams"),
        ({"dialect": "trtllm", "placeholders": True}, "only vLLM has placeholders"),
        ({"ranks": 0}, "ranks must be at least 1"),
        ({"host_blocks": -1}, "host_blocks must be at least 0"),
        ({"connect": True}, "there is no port 0 to connect to"),
        (
            {"ranks": 2, "dialect": "sglang-0.4"},
            "SGLang tells one port for all ranks: give it one that is not 0",
        ),
        (
            {"ranks": 2, "events_endpoint": "ipc://kv"},
            "several ranks need a TCP endpoint, not 'ipc://kv'",
        ),
        (
            {
                "ranks": 2,
                "events_endpoint": "tcp://*:5557",
                "replay_endpoint": "tcp://*:5558",
            },
            "no room for 2 ranks from the port of 'tcp://*:5558' on",
        ),
        (
            {"ranks": 2, "events_endpoint": "tcp://*:65535"},
            "no room for 2 ranks from the port of 'tcp://*:65535' on",
        ),
    ],
)
def test_contradictory_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Settings(**wrong)


async def test_publisher_connects_to_a_subscriber_that_binds() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as sub:
        sub.subscribe(b"")
        port = sub.bind_to_random_port("tcp://127.0.0.1")
        settings = Settings(connect=True, events_endpoint=f"tcp://127.0.0.1:{port}")
        async with running(settings) as worker, Client(worker.url) as own, asyncio.timeout(60):
            while not await sub.poll(20):
                await store_block(own)
            assert len(await sub.recv_multipart()) == 3
            worker.faults.restart()
            assert await complete(own, PROMPT) == 0
            while not await sub.poll(20):
                await store_block(own)


async def test_unreachable_endpoint_is_named() -> None:
    settings = Settings(connect=True, events_endpoint="tcp://nowhere")
    with pytest.raises(OSError, match="cannot connect to tcp://nowhere: "):
        async with running(settings):
            pass
