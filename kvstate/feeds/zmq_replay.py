"""A replay of a ZMQ publisher, asked for as a DEALER over a connection of its own.

vLLM and SGLang answer replays on a ROUTER socket; the request is [empty, first number (8 bytes
big-endian)], the answers are parsed by `kvstate.wire.zmq_wire`.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from kvstate.errors import ReplayError, WireError
from kvstate.feeds.transport import Batch, Malformed
from kvstate.feeds.zmtp_connection import Connection, place_of
from kvstate.wire.zmq_wire import parse_frames

Answer = TypeVar("Answer")

# How long a publisher may take for each message of a replay.
REPLAY_TIMEOUT_SECONDS = 5.0
REPLAY_CONNECT_SECONDS = 0.05

# Answers taken at once.
MAX_ANSWERS = 64


async def replay_from(endpoint: str | None, start: int) -> AsyncGenerator[Batch | Malformed]:
    """Asks an endpoint, None if there is none, for the batches from `start` on.

    Raises:
        ReplayError: no answer in time, or none that is a replay.
    """
    if endpoint is None:
        raise ReplayError("no replay endpoint")
    wake = asyncio.Event()
    connection = Connection(b"DEALER", lambda _: wake.set())
    try:
        await _in_time(_connected(connection, endpoint))
        connection.send([b"", start.to_bytes(8, "big")])
        last = -1
        while True:
            for message in await _in_time(_answers(connection, wake)):
                frames = parse_frames(message)
                if frames.ends_replay:
                    return
                if frames.sequence <= last:
                    raise ReplayError("its numbers do not ascend")
                last = frames.sequence
                yield Batch(frames.sequence, frames.payload)
    except WireError as error:
        raise ReplayError(str(error)) from None
    finally:
        connection.give_up("done")


async def _connected(connection: Connection, endpoint: str) -> None:
    """Connects for a replay; a publisher that starts may open its sockets one by one."""
    place = place_of(endpoint)
    if place is None:
        raise ReplayError(f"{endpoint} is neither tcp://host:port nor ipc://path")
    while not connection.is_ready:
        try:
            await connection.open(place)
        except OSError:
            await asyncio.sleep(REPLAY_CONNECT_SECONDS)
        if connection.is_lost:
            raise ReplayError(connection.fault or "connection lost")


async def _answers(connection: Connection, wake: asyncio.Event) -> list[list[bytes]]:
    """Messages of a replay, at least one."""
    while not (messages := connection.take(MAX_ANSWERS)):
        if connection.is_lost:
            raise ReplayError(connection.fault or "connection lost")
        wake.clear()
        await wake.wait()
    return messages


async def _in_time(step: Awaitable[Answer]) -> Answer:
    """One step of a replay."""
    try:
        async with asyncio.timeout(REPLAY_TIMEOUT_SECONDS):
            return await step
    except TimeoutError:
        raise ReplayError(f"no answer within {REPLAY_TIMEOUT_SECONDS:g} s") from None
