"""A store that publishes its own events, from its socket to the pick of a router behind Envoy."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvtools.simulator.worker import SimulatedWorker
from tests.kvstate.zmq_publisher import Publisher
from tests.ports import free_port
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

# As Mooncake's master names a block of vLLM's (kvstate.wire.mooncake_wire).
KEY = "tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"
BLOCKS = 'kvsteer_store_blocks{store="pool"}'
END_OF_REPLAY = b"\xff" * 8
BODY = chat(long_text("alpha"))
# An answer of so many tokens takes longer than the test, which does not wait for it.
TOKENS, SPEED = 600, 10.0


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


class Master:
    """A store's master, which tells of each block that an engine's events name."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._sent = 0

    async def tell(self, kind: str, hashes: list[int]) -> None:
        events = [
            {"event_type": kind, "medium": "cpu", "object_key": f"{KEY}{one:064x}"}
            for one in hashes
        ]
        payload = msgspec.msgpack.encode([1_000, events, None])
        await self._socket.send_multipart([b"", self._sent.to_bytes(8, "big"), payload])
        self._sent += 1


async def stored_by(worker: SimulatedWorker, publisher: Publisher) -> list[int]:
    """The hashes of all blocks that a worker's events named so far, from its replay."""
    socket = publisher.connect(zmq.DEALER, worker.replay_endpoint or "")
    await socket.send_multipart([b"", bytes(8)])
    hashes: list[int] = []
    while True:
        *_, number, payload = await socket.recv_multipart()
        if number == END_OF_REPLAY:
            return hashes
        for event in msgspec.msgpack.decode(payload)[1]:
            hashes += event["block_hashes"] if event["type"] == "BlockStored" else []


@asynccontextmanager
async def mounted(publisher: Publisher) -> AsyncIterator[tuple[System, Master]]:
    """Two workers that mount a store, behind a router that follows it."""
    socket, endpoint = publisher.bind(zmq.XPUB)
    endpoints = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    store = {"name": "pool", "workers": endpoints, "zmq": endpoint, "worth_percent": 90}
    each = [{"listen": one} for one in endpoints]
    async with running(
        each=each, changes={"stores": [store]}, decode_tokens_per_second=SPEED
    ) as system:
        assert await socket.recv() == b"\x01"
        yield system, Master(socket)


async def offered(system: System) -> dict[str, Any]:
    """What each worker could load of the prompt, by endpoint."""
    found = (await system.explain(BODY))["candidates"]
    return {one["endpoint"]: one["fetch"] for one in found}


async def test_idle_worker_loads_from_a_store_what_a_busy_one_computed(
    publisher: Publisher,
) -> None:
    async with mounted(publisher) as (system, master):
        running_one = asyncio.create_task(system.send(BODY | {"max_tokens": TOKENS}))
        await until(lambda: system.in_flight(1), "a request runs")
        (holder,) = [one["endpoint"] for one in await system.status() if one["in_flight"]]
        by_endpoint = {one.endpoint: one for one in system.workers}
        (idle,) = by_endpoint.keys() - {holder}
        await system.learned(BODY, holder)
        hashes = await stored_by(by_endpoint[holder], publisher)
        await master.tell("stored", hashes)

        async def is_offered() -> bool:
            found = (await offered(system))[idle]
            return found is not None and found["from"] == "pool" and found["tokens"] > 100

        async def knows(blocks: int) -> bool:
            return await system.metric(BLOCKS) == blocks

        await until(is_offered, "the store's blocks are offered")
        await until(partial(knows, len(hashes)), "all are known")
        assert (await system.send(BODY))[:2] == (200, idle)
        await master.tell("removed", hashes[:1])
        await until(partial(knows, len(hashes) - 1), "the first block is removed")
        running_one.cancel()
