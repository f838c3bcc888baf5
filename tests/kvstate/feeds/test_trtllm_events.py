import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from kvstate.bridge.bridge import Bridge, Subscription
from kvstate.events import Batch, BlocksRemoved, BlocksStored, EventBatch
from kvstate.feeds.drain_limits import DrainLimits
from kvstate.feeds.transport import Connected, Disconnected, Malformed, Refused, Signal
from kvstate.feeds.trtllm_transport import trtllm_events
from kvstate.pb.kvsteer_kv_events_pb2 import KvEventBatch
from tests.kvstate.publishing import PATIENCE_SECONDS
from tests.waiting import until


def created(event_id: int, **fields: Any) -> dict[str, Any]:
    return {"event_id": event_id, "data": {"type": "created"}, **fields}


def stored(event_id: int, block_hash: int, **fields: Any) -> dict[str, Any]:
    tokens = [{"token_id": token, "token_extra_id": 0} for token in (1, 2)]
    blocks = [{"block_hash": block_hash, "tokens": tokens, "cache_level": 0}]
    data = {"type": "stored", "parent_hash": None, "blocks": blocks}
    return {"event_id": event_id, "data": data, **fields}


class Llm:
    """Yields the items that it was given, or raises them, once each."""

    def __init__(self, *drains: list[Any] | Exception, ranks: int = 1, **limits: Any) -> None:
        self._drains = deque(drains)
        self._clock = 0.0
        hasty = DrainLimits(**limits)
        self.transports = trtllm_events(self.drain, ranks, self.clock, lambda: 0.0, hasty)

    def clock(self) -> float:
        return 7.0

    async def drain(self) -> AsyncIterator[Any]:
        drained = self._drains.popleft() if self._drains else []
        if isinstance(drained, Exception):
            raise drained
        for item in drained:
            yield item

    async def signals(self, count: int, rank: int = 0) -> list[Signal]:
        """Receives at least this many signals of a rank."""
        received: list[Signal] = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(received) < count:
                received += await self.transports[rank].receive()
        return received

    async def close(self) -> None:
        for transport in self.transports:
            await transport.close()


def events(signal: Signal) -> list[object]:
    assert isinstance(signal, Batch)
    assert isinstance(signal.body, EventBatch)
    return list(signal.body.events)


async def test_events_keep_their_own_numbers() -> None:
    llm = Llm([created(0), stored(1, 2**64 - 1)], [{"event_id": 2, "data": {"type": "removed"}}])
    connected, *batches = await llm.signals(4)
    await llm.close()
    assert connected == Connected()
    assert [batch.sequence for batch in batches if isinstance(batch, Batch)] == [0, 1, 2]
    (block,) = events(batches[1])
    assert isinstance(block, BlocksStored)
    assert (block.hashes, list(block.tokens)) == ([2**64 - 1], [1, 2])


async def test_lists_and_json_texts_are_read_as_events() -> None:
    removed = {"event_id": 2, "data": {"type": "removed", "block_hashes": [5]}}
    llm = Llm([[created(0), [stored(1, 5)]], json.dumps(removed), b'{"event_id": 3}'])
    _, *batches = await llm.signals(5)
    await llm.close()
    assert [batch.sequence for batch in batches if isinstance(batch, Batch)] == [0, 1, 2, 3]
    assert events(batches[2]) == [BlocksRemoved([5])]


async def test_drains_have_stamps_of_their_own() -> None:
    llm = Llm([created(0), created(1)], [created(0)])
    _, *batches = await llm.signals(4)
    await llm.close()
    stamps = [
        b.body.timestamp for b in batches if isinstance(b, Batch) and not isinstance(b.body, bytes)
    ]
    assert stamps[0] == stamps[1] == 7.0
    assert stamps[2] > 7.0


async def test_ranks_get_their_own_events() -> None:
    llm = Llm(
        [stored(0, 1, attention_dp_rank=1), stored(0, 2), stored(0, 3, attention_dp_rank=9)],
        ranks=2,
    )
    _, batch = await llm.signals(2, rank=1)
    await llm.signals(2, rank=0)
    await llm.close()
    (block,) = events(batch)
    assert isinstance(block, BlocksStored)
    assert block.hashes == [1]


async def test_invalid_event_is_reported_as_malformed_and_skipped() -> None:
    llm = Llm([object(), "\ud800", 5, created(0)])
    signals = await llm.signals(5)
    await llm.close()
    assert signals[1:4] == [Malformed()] * 3
    assert isinstance(signals[4], Batch)


async def test_engine_that_raises_is_asked_again() -> None:
    llm = Llm(OSError("secret"), [created(0)])
    signals = await llm.signals(3)
    await llm.close()
    assert signals[:2] == [Disconnected("its events could not be read: OSError"), Connected()]


async def test_engine_without_events_is_refused() -> None:
    llm = Llm(NotImplementedError("event_buffer_max_size is 0"))
    signals = await llm.signals(1)
    await llm.close()
    assert signals == [Refused("event_buffer_max_size is 0")]


async def test_idle_engine_is_connected() -> None:
    llm = Llm()
    assert await llm.signals(1) == [Connected()]
    await llm.close()


async def test_events_in_one_list_are_read_in_slices() -> None:
    llm = Llm([created(number) for number in range(1_000)], slice_seconds=0.0)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await llm.signals(1_001)
    counting.cancel()
    await llm.close()
    assert turns > 500


async def test_bridge_beside_the_engine_streams_its_events() -> None:
    llm = Llm([created(0), stored(1, 2**64 - 1)])
    bridge = Bridge(llm.transports, llm.clock, lambda: 0.0)
    following = asyncio.create_task(bridge.run())
    await until(lambda: bridge.fault is None and bridge.ranks[0].mirror.copies == 1)
    stream = bridge.subscribe(0)
    assert isinstance(stream, Subscription)
    message = await bridge.next_message(stream)
    assert isinstance(message, bytes)
    _, event = KvEventBatch.FromString(message).events
    assert [block.block_hash for block in event.stored.blocks] == [-1]
    following.cancel()
    await asyncio.wait([following])
