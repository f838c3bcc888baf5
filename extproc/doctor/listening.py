"""Listens to feeds beside a router that runs, and asks for replays."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence

from extproc.doctor.heard import Heard
from kvstate.errors import ReplayError
from kvstate.feeds.feed_sources import DrainSource, GrpcSource, ZmqSource
from kvstate.feeds.grpc_transport import grpc_transports
from kvstate.feeds.replays import MAX_REPLAY_SECONDS
from kvstate.feeds.transport import (
    Batch,
    Connected,
    Disconnected,
    Malformed,
    Refused,
    Signal,
    Snapshot,
    Transport,
)
from kvstate.feeds.trtllm_transport import drain_transports
from kvstate.feeds.zmq_transport import ZmqTransport

# A replay from here has no batches, only its end: it costs the engine nothing.
BEYOND_ALL = 1 << 62


class Listener:
    """One rank's feed, listened to until it is closed."""

    def __init__(self, rank: int, transport: Transport, *, is_live: bool) -> None:
        self.heard = Heard(rank, is_live=is_live)
        self._transport = transport
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._listen())

    async def until(self, condition: Callable[[Heard], bool], seconds: float) -> bool:
        """Waits until what was heard meets a condition; whether it did in time."""
        try:
            async with asyncio.timeout(seconds):
                while not condition(self.heard):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Listens no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._transport.close()

    async def _listen(self) -> None:
        while not self.heard.is_over_limit:
            for signal in await self._transport.receive():
                self._take(signal)
            self._changed.set()
            await asyncio.sleep(0)  # a feed that never pauses must not keep others from their turn

    def _take(self, signal: Signal) -> None:
        heard = self.heard
        heard.count_message()
        match signal:
            case Connected():
                heard.is_connected = True
            case Disconnected(reason):
                heard.lost = reason
            case Refused(reason):
                heard.refused = reason
            case Snapshot():
                heard.last_sequence = None
            case Malformed():
                heard.unreadable += 1
            case Batch(sequence, body):
                heard.take(sequence, body, time.time())


def subscribed(sources: Mapping[int, ZmqSource]) -> list[Listener]:
    """Listeners for some ranks of a ZMQ feed."""
    return [Listener(rank, ZmqTransport(one), is_live=True) for rank, one in sources.items()]


def connected(source: GrpcSource | DrainSource) -> list[Listener]:
    """Listeners for all ranks of a feed with one connection."""
    transports: Sequence[Transport] = (
        grpc_transports(source, random.random)
        if isinstance(source, GrpcSource)
        else drain_transports(source, random.random)
    )
    return [Listener(rank, one, is_live=False) for rank, one in enumerate(transports)]


async def replayed(
    source: ZmqSource, start: int, seconds: float, heard: Heard | None = None
) -> tuple[list[int], str]:
    """The numbers of the batches that a replay gives; why it did not come to its end, "" if it did.

    start: the first number that is asked for. seconds: for each batch, not for all: a full buffer
    takes as long as it takes. heard: takes in what comes.
    """
    transport = ZmqTransport(source)
    numbers: list[int] = []
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(seconds) as patience, asyncio.timeout(MAX_REPLAY_SECONDS):
            async for batch in transport.replay(start):
                numbers.append(getattr(batch, "sequence", start))
                if heard is not None and isinstance(batch, Batch):
                    heard.take(batch.sequence, batch.body, time.time())
                patience.reschedule(now() + seconds)
                await asyncio.sleep(0)  # nor must a replay
    except TimeoutError:
        return numbers, f"neither a batch nor the end within {seconds:g} s"
    except ReplayError as error:
        return numbers, str(error)
    finally:
        await transport.close()
    return numbers, ""
