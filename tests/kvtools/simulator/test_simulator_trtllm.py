"""TensorRT-LLM's event list, drained over HTTP."""

from typing import Any

import pytest

from kvtools.simulator.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvtools.simulator.rank import EventDrain
from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings
from tests.kvtools.simulator.readers import Client, complete, post, published

PROMPT = range(100, 133)


def new_drain(*, max_events: int = 100, rank: int | None = None) -> EventDrain:
    return EventDrain(blocks_per_level=(8, 4), window_tokens=64, max_events=max_events, rank=rank)


def stored(*hashes: int, parent: int | None = None, medium: str = "GPU") -> BlockStored:
    return BlockStored(hashes, parent, tuple(range(2 * len(hashes))), 2, None, medium, None)


def data_of(drain: EventDrain) -> list[dict[str, Any]]:
    return [event["data"] for event in drain.take()]


async def drained(client: Client) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = await post(client, "/kv_cache_events", {})
    return events


async def test_events_are_drained_once_and_numbered_from_created() -> None:
    settings = Settings(dialect="trtllm", events_endpoint=None, replay_endpoint=None)
    async with running(settings) as worker, Client(worker.url) as own:
        [created] = await drained(own)
        assert created == {
            "event_id": 0,
            "data": {"type": "created", "num_blocks_per_cache_level": [1024]},
            "window_size": 16384,
        }
        await complete(own, PROMPT)
        [event] = await drained(own)
        assert (event["event_id"], event["data"]["type"]) == (1, "stored")
        assert await drained(own) == []


async def test_stored_block_has_its_own_tokens_and_the_hashes_of_the_stream() -> None:
    async with running(Settings(dialect="trtllm")) as worker, Client(worker.url) as own:
        await complete(own, PROMPT)
        [_, event] = await drained(own)
        [streamed] = await published(worker)
    blocks = event["data"]["blocks"]
    assert event["data"]["parent_hash"] is None
    assert [block["block_hash"] for block in blocks] == streamed["block_hashes"]
    assert all(block["block_hash"] >= 0 for block in blocks)
    assert blocks[1]["tokens"][0] == {
        "type": "unique_token",
        "token_id": PROMPT[16],
        "token_extra_id": 0,
    }
    del blocks[0]["tokens"], blocks[0]["block_hash"]
    assert blocks[0] == {"type": "stored_block", "cache_level": 0, "priority": 35}


async def test_ranks_number_their_own_events() -> None:
    async with running(Settings(dialect="trtllm", ranks=2)) as worker, Client(worker.url) as own:
        events = await drained(own)
    assert [(event["attention_dp_rank"], event["event_id"]) for event in events] == [(0, 0), (1, 0)]


async def test_restart_creates_the_cache_again() -> None:
    async with running(Settings(dialect="trtllm")) as worker, Client(worker.url) as own:
        await complete(own, PROMPT)
        worker.faults.restart()
        [created] = await drained(own)
        assert (created["event_id"], created["data"]["type"]) == (0, "created")


def test_oldest_events_are_lost_without_a_reader() -> None:
    drain = new_drain(max_events=2)
    drain.record([stored(1), stored(2), stored(3)])
    assert [event["event_id"] for event in drain.take()] == [2, 3]


def test_moved_block_is_updated_and_counts_at_its_nearest_tier() -> None:
    drain = new_drain()
    drain.take()
    drain.record([stored(1), stored(1, medium="CPU"), BlockRemoved((1,), "GPU")])
    drain.record([stored(1), BlockRemoved((1,), "CPU"), BlockRemoved((1,), "GPU")])
    first, to_host, to_device, removed = data_of(drain)
    assert first["type"] == "stored"
    assert to_host == {
        "type": "updated",
        "block_hash": 1,
        "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0},
        "priority": None,
    }
    assert to_device["cache_level"] == {"type": "event_diff", "new_value": 0, "old_value": 1}
    assert removed == {"type": "removed", "block_hashes": [1]}


def test_run_of_new_blocks_is_cut_at_known_ones() -> None:
    drain = new_drain()
    drain.record([stored(2, parent=1, medium="CPU")])
    drain.take()
    drain.record([stored(1, 2, 3, 4, parent=9)])
    before, moved, after = data_of(drain)
    assert (before["parent_hash"], len(before["blocks"])) == (9, 1)
    assert moved["type"] == "updated"
    assert (after["parent_hash"], len(after["blocks"])) == (2, 2)
    assert [token["token_id"] for token in after["blocks"][0]["tokens"]] == [4, 5]


def test_evicted_and_moved_blocks_have_different_events() -> None:
    drain = new_drain()
    drain.record([stored(1, 2), stored(2, medium="CPU")])
    drain.take()
    drain.record([BlockRemoved((1, 2), "GPU")])
    assert [data["type"] for data in data_of(drain)] == ["updated", "removed"]


def test_drain_refuses_a_clear() -> None:
    with pytest.raises(AssertionError):
        new_drain().record([AllBlocksCleared()])


async def test_reset_removes_every_block() -> None:
    async with running(Settings(dialect="trtllm")) as worker, Client(worker.url) as own:
        await complete(own, PROMPT)
        await post(own, "/reset_prefix_cache", {})
        removed = (await drained(own))[-1]["data"]
        assert (removed["type"], len(removed["block_hashes"])) == ("removed", 2)
        assert (await published(worker))[-1]["block_hashes"] == removed["block_hashes"]
