"""Clients of a simulated worker: of its API, of its events and of its replays."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from kvtools.simulator.server import SimulatedWorker

Client = aiohttp.ClientSession
Body = dict[str, Any]
Message = list[bytes]

END = [b"", b"", b"\xff" * 8, b""]
OLD_END = [b"", b"\xff" * 8, b""]

_unique = count(1000)


async def post(client: Client, path: str, body: Body, **headers: str) -> Any:
    async with client.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def complete(client: Client, prompt: Sequence[int], *, generate: int = 1, **rest: Any) -> int:
    """Runs a prompt; returns how many of its tokens were cached."""
    body = {"prompt": list(prompt), "max_tokens": generate, **rest}
    usage = (await post(client, "/v1/completions", body))["usage"]
    cached: int = (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
    return cached


async def store_block(client: Client, **headers: str) -> None:
    """Makes the worker publish one batch: a new block of 16 tokens."""
    body = {"prompt": [next(_unique)] * 16, "max_tokens": 1}
    await post(client, "/v1/completions", body, **headers)


@asynccontextmanager
async def socket(kind: int, endpoint: str | None) -> AsyncIterator[zmq.asyncio.Socket]:
    assert endpoint is not None
    context = zmq.asyncio.Context()
    result = context.socket(kind)
    result.linger = 0
    result.ipv6 = "[" in endpoint
    result.connect(endpoint)
    try:
        yield result
    finally:
        result.close()
        context.term()


@asynccontextmanager
async def subscribed(worker: SimulatedWorker, client: Client) -> AsyncIterator[zmq.asyncio.Socket]:
    """A subscriber that gets rank 0's next batch and has seen all before."""
    async with socket(zmq.SUB, worker.events_endpoint) as sub, asyncio.timeout(60):
        sub.subscribe(b"")
        await joined(worker, client, sub)
        yield sub


async def joined(worker: SimulatedWorker, client: Client, sub: zmq.asyncio.Socket) -> None:
    """Publishes until a subscription has arrived, since it has no answer."""
    while not await sub.poll(20):
        await store_block(client)
    while sequence_of(await sub.recv_multipart()) + 1 < worker.next_sequence():
        pass


async def replay(worker: SimulatedWorker, start: int, *, rank: int = 0) -> list[Message]:
    """All batches kept from a sequence number on, without the end marker."""
    async with socket(zmq.DEALER, worker.replay_endpoints[rank]) as dealer, asyncio.timeout(60):
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        received = [await dealer.recv_multipart()]
        while received[-1] not in (END, OLD_END):
            received.append(await dealer.recv_multipart())
        return received[:-1]


async def received(sub: zmq.asyncio.Socket, messages: int) -> list[Message]:
    return [await sub.recv_multipart() for _ in range(messages)]


def sequence_of(message: Message) -> int:
    return int.from_bytes(message[-2], "big")


def sequences(messages: Sequence[Message]) -> list[int]:
    return [sequence_of(message) for message in messages]


def events_of(message: Message) -> list[Any]:
    events: list[Any] = msgspec.msgpack.decode(message[-1])[1]
    return events


async def published(worker: SimulatedWorker, *, rank: int = 0) -> list[Any]:
    """All events since the worker started, in order."""
    messages = await replay(worker, 0, rank=rank)
    return [event for message in messages for event in events_of(message)]
