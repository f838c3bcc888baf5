"""SGLang's hashes, pages and habits against a recording of its radix cache (0.5.23)."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq

from kvtools.simulator.cache import PrefixCache, Shape
from kvtools.simulator.dialects import DIALECTS
from kvtools.simulator.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvtools.simulator.hashing import NO_NAMESPACE, Adapter, CacheNamespace, SglangHashing
from kvtools.simulator.server import running, server_info
from kvtools.simulator.settings import Settings
from tests.kvtools.simulator.readers import Client, complete, published, socket, subscribed

Recording = Callable[[str], list[dict[str, Any]]]

# The recording's other namespace has a name that this layout does not show.
LAYOUT = DIALECTS["sglang-0.5.20"].layout


def new_cache(*, blocks: int = 100, page: int = 16, bigrams: bool = False) -> PrefixCache:
    habits = DIALECTS["sglang-0.5.22"].habits
    return PrefixCache(
        Shape(blocks=blocks, block_size=page, hashing=SglangHashing(bigrams), habits=habits)
    )


def run(
    cache: PrefixCache,
    prompt: Sequence[int],
    namespace: CacheNamespace = NO_NAMESPACE,
    *,
    generated: Sequence[int] = (),
) -> int:
    holding = cache.begin(prompt, namespace)
    assert holding is not None
    for token in generated:
        cache.extend(holding, token)
    cache.release(holding)
    return holding.cached_tokens


def recorded_events(record: dict[str, Any]) -> bytes:
    events = [msgspec.msgpack.decode(payload)[1] for payload in record["payloads"]]
    return msgspec.msgpack.encode([event for batch in events for event in batch])


def written(events: Sequence[Event]) -> bytes:
    return msgspec.msgpack.encode(LAYOUT.encode(events))


def test_recorded_requests_give_the_recorded_events(recording: Recording) -> None:
    cache = new_cache()
    records = {one["scenario"]: one for one in recording("sglang_0.5.23_radix")}
    assert written(cache.take_events()) == recorded_events(records["z_initial_after_construct"])
    for scenario, namespace in (
        ("a_first_70tok_page16", NO_NAMESPACE),
        ("a2_same_again", NO_NAMESPACE),
        ("b_longer_suffix", NO_NAMESPACE),
        ("b2_diverge_splits_node", NO_NAMESPACE),
        ("f_cache_salt", CacheNamespace(salt="tenant-A")),
        ("e_extra_key_unregistered", CacheNamespace(Adapter("lora-ns", 1))),
        ("b5_shorter_than_page_no_event", NO_NAMESPACE),
    ):
        run(cache, records[scenario]["prompt_token_ids"], namespace)
        assert written(cache.take_events()) == recorded_events(records[scenario]), scenario
    assert cache.reset()
    assert written(cache.take_events()) == recorded_events(records["d_reset"])


def test_recorded_bigrams_are_hashed_and_shown_as_pairs(recording: Recording) -> None:
    records = {one["scenario"]: one for one in recording("sglang_0.5.23_radix")}
    cache = new_cache(page=4, bigrams=True)
    cache.take_events()
    run(cache, records["eagle_bigram_page4"]["prompt_token_ids"])
    assert written(cache.take_events()) == recorded_events(records["eagle_bigram_page4"])


@pytest.mark.parametrize(("length", "cached"), [(13, 8), (14, 12), (17, 12), (18, 16), (19, 16)])
def test_hit_on_bigrams_leaves_two_tokens_to_compute(length: int, cached: int) -> None:
    cache = new_cache(page=4, bigrams=True)
    run(cache, range(40))
    assert run(cache, range(length)) == cached == cache.held_tokens(range(length), NO_NAMESPACE)


def test_page_of_bigrams_needs_the_token_after_it() -> None:
    cache = new_cache(page=4, bigrams=True)
    run(cache, range(3), generated=[3])
    run(cache, range(10, 13), generated=[13, 14])
    stored = [event for event in cache.take_events() if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored] == [((10, 11), (11, 12), (12, 13), (13, 14))]


def test_equal_pages_are_kept_once() -> None:
    cache = new_cache(page=4)
    cache.take_events()
    holdings = [cache.begin(range(8), NO_NAMESPACE, reuse=False) for _ in range(3)]
    for holding in holdings:
        assert holding is not None
        cache.release(holding)
    assert len(cache.take_events()) == 1
    assert cache.blocks_held == (2, 0)
    assert cache.usage == 0


def test_pages_of_an_adapter_share_hashes_with_the_base_model_and_no_blocks() -> None:
    cache = new_cache(page=4)
    cache.take_events()
    adapter = CacheNamespace(Adapter("a", 1))
    assert [run(cache, range(9), one) for one in (NO_NAMESPACE, adapter, adapter)] == [0, 0, 8]
    base, other = (event for event in cache.take_events() if isinstance(event, BlockStored))
    assert base.block_hashes == other.block_hashes
    assert other.lora_name == "a"


def test_evicted_pages_are_removed_from_the_end_of_a_chain_in_one_event() -> None:
    cache = new_cache(blocks=5, page=4)
    run(cache, range(16))
    [_, stored] = cache.take_events()
    run(cache, range(100, 112))
    removed = LAYOUT.encode(cache.take_events())[0]
    assert isinstance(stored, BlockStored)
    assert isinstance(removed, dict)
    assert list(removed["block_hashes"]) == list(reversed(stored.block_hashes))[:3]


async def test_first_batch_of_every_incarnation_is_a_clear() -> None:
    async with running(Settings(dialect="sglang-0.5.22")) as worker:
        assert await published(worker) == [{"type": "AllBlocksCleared"}]
        worker.faults.restart()
        assert await published(worker) == [{"type": "AllBlocksCleared"}]


async def test_pages_of_an_answer_are_announced_at_its_end() -> None:
    settings = Settings(dialect="sglang-0.5.22", block_size_tokens=4)
    async with running(settings) as worker, Client(worker.url) as own:
        async with subscribed(worker, own) as sub:
            await complete(own, range(6), generate=8)
            prompt, answer = await sub.recv_multipart(), await sub.recv_multipart()
        stored = [msgspec.msgpack.decode(frames[2])[1] for frames in (prompt, answer)]
        assert [len(event["block_hashes"]) for [event] in stored] == [1, 2]
        assert stored[1][0]["parent_block_hash"] == stored[0][0]["block_hashes"][0]


def test_pages_differ_by_tokens_salt_and_adapter_only() -> None:
    cache = new_cache(page=4)
    for namespace in (NO_NAMESPACE, CacheNamespace(salt="s"), CacheNamespace(Adapter("a", 1), "s")):
        assert run(cache, range(9), namespace) == 0
        assert run(cache, range(9), namespace) == 8
    kinds = [type(event) for event in cache.take_events()]
    assert kinds == [AllBlocksCleared, BlockStored, BlockStored, BlockStored]
    assert BlockRemoved not in kinds


async def test_load_is_published_as_sglang_does() -> None:
    settings = Settings(dialect="sglang-0.5.22", load_endpoint="tcp://127.0.0.1:0", blocks=100)
    async with running(settings) as worker, asyncio.timeout(60):
        (endpoint,) = worker.load_endpoints
        async with socket(zmq.SUB, endpoint) as sub:
            sub.subscribe(b"load")
            topic, first, payload = await sub.recv_multipart()
            again = await sub.recv_multipart()  # the heartbeat
    assert topic == b"load"
    assert payload == msgspec.msgpack.encode(["LoadStat", 0, 0, 0, 1600, 0])
    assert again == [b"load", (int.from_bytes(first, "big") + 1).to_bytes(8, "big"), payload]
    assert server_info(worker)["kv_events"]["load_endpoint_port_base"] == int(
        endpoint.rpartition(":")[2]
    )


async def test_load_counts_running_and_waiting_requests() -> None:
    settings = Settings(
        dialect="sglang-0.5.22",
        load_endpoint="tcp://127.0.0.1:0",
        max_running_requests=1,
        decode_tokens_per_second=1.0,
    )
    async with (
        running(settings) as worker,
        aiohttp.ClientSession(worker.url) as client,
        socket(zmq.SUB, worker.load_endpoints[0]) as sub,
        asyncio.timeout(60),
    ):
        sub.subscribe(b"")
        bodies = [[number] * 32 for number in (1, 2)]
        asked = [asyncio.create_task(complete(client, one, generate=500)) for one in bodies]
        stat: list[Any] = []
        while stat[1:3] != [1, 1]:
            stat = msgspec.msgpack.decode((await sub.recv_multipart())[-1])
        assert 0 < stat[3] < stat[4]
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"dialect": "vllm-0.32"},
        {"dialect": "sglang-0.5.18"},
        {"dialect": "sglang-0.5.22", "events_endpoint": None, "replay_endpoint": None},
    ],
)
def test_load_endpoint_needs_a_new_release_with_events(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="load"):
        Settings(load_endpoint="tcp://127.0.0.1:0", **settings)
