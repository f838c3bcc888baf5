"""Misbehaviour on request, as a subscriber and a client of replays see it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvtools.simulator.interference import Fate, Interference
from kvtools.simulator.server import SimulatedWorker, running
from kvtools.simulator.settings import Settings
from tests.kvtools.simulator.readers import (
    Client,
    complete,
    events_of,
    joined,
    post,
    received,
    replay,
    sequence_of,
    sequences,
    socket,
    store_block,
    subscribed,
)
from tests.waiting import until

PROMPT = range(100, 117)


@pytest.fixture
async def worker() -> AsyncIterator[SimulatedWorker]:
    async with running(Settings(loras=("ad-a",), misbehave=True)) as worker:
        yield worker


@pytest.fixture
async def client(worker: SimulatedWorker) -> AsyncIterator[Client]:
    async with Client(worker.url) as session:
        yield session


async def store(client: Client, batches: int) -> None:
    for _ in range(batches):
        await store_block(client)


async def ask(dealer: zmq.asyncio.Socket) -> None:
    await dealer.send_multipart([b"", b"\0" * 8])


@pytest.mark.parametrize(("fault", "kept"), [("drop", True), ("lose", False)])
async def test_dropped_batches_can_be_replayed_and_lost_ones_cannot(
    worker: SimulatedWorker, client: Client, fault: str, *, kept: bool
) -> None:
    async with subscribed(worker, client) as sub:
        start = worker.next_sequence()
        await post(client, "/misbehave", {fault: 2})
        await store(client, 3)
        assert sequences(await received(sub, 1)) == [start + 2]
        again = sequences(await replay(worker, start))
        assert again == ([start, start + 1, start + 2] if kept else [start + 2])


async def test_duplicate_is_sent_twice_and_kept_once(
    worker: SimulatedWorker, client: Client
) -> None:
    async with subscribed(worker, client) as sub:
        start = worker.next_sequence()
        await post(client, "/misbehave", {"duplicate": 1})
        await store(client, 2)
        assert sequences(await received(sub, 3)) == [start, start, start + 1]
        assert sequences(await replay(worker, start)) == [start, start + 1]


async def test_reorder_swaps_two_batches_on_the_way_and_not_in_the_buffer(
    worker: SimulatedWorker, client: Client
) -> None:
    async with subscribed(worker, client) as sub:
        start = worker.next_sequence()
        await post(client, "/misbehave", {"reorder": True})
        await store(client, 3)
        assert sequences(await received(sub, 3)) == [start + 1, start, start + 2]
        assert sequences(await replay(worker, start)) == [start, start + 1, start + 2]


@pytest.mark.parametrize("dialect", ["vllm-0.9", "vllm-0.32"])
async def test_corrupt_event_leaves_its_batch_readable(dialect: str) -> None:
    settings = Settings(dialect=dialect, blocks=3)
    async with (
        running(settings) as worker,
        Client(worker.url) as own,
        subscribed(worker, own) as sub,
    ):
        worker.faults.corrupt("event")
        await complete(own, PROMPT)
        [message] = await received(sub, 1)
        spoiled, *_, stored = events_of(message)
        hashes = spoiled[1] if isinstance(spoiled, list) else spoiled["block_hashes"]
        assert hashes == "no list of hashes"
        assert "BlockStored" in (stored[0] if isinstance(stored, list) else stored["type"])
        [again] = await replay(worker, sequence_of(message))
        assert again[-1] == message[-1]
        await store_block(own)
        assert "no list of hashes" not in str(events_of((await received(sub, 1))[0]))


async def test_corrupt_batch_is_no_msgpack_after_a_real_change(
    worker: SimulatedWorker, client: Client
) -> None:
    async with subscribed(worker, client) as sub:
        await post(client, "/misbehave", {"corrupt": "batch"})
        await complete(client, PROMPT)
        [message] = await received(sub, 1)
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(message[2])
        assert worker.held_prefix_tokens(PROMPT) == 16
        await store_block(client)
        assert events_of((await received(sub, 1))[0])


async def test_garbage_takes_sequence_numbers(worker: SimulatedWorker, client: Client) -> None:
    async with subscribed(worker, client) as sub:
        start = worker.next_sequence()
        await post(client, "/misbehave", {"garbage": 50})
        await store_block(client)
        messages = await received(sub, 51)
        assert sequences(messages) == list(range(start, start + 51))
        assert len({message[2] for message in messages}) == 51
        assert worker.next_sequence() == start + 51


async def test_restart_keeps_the_ports_and_nothing_else(
    worker: SimulatedWorker, client: Client
) -> None:
    before = (worker.events_endpoint, worker.replay_endpoint)
    async with subscribed(worker, client) as sub:
        await complete(client, PROMPT)
        await received(sub, 1)
        await post(client, "/misbehave", {"restart": True})
        assert (worker.events_endpoint, worker.replay_endpoint) == before
        assert worker.next_sequence() == worker.held_prefix_tokens(PROMPT) == 0
        assert await replay(worker, 0) == []
        assert not await sub.poll(0)
        await joined(worker, client, sub)
        assert sequence_of((await replay(worker, 0))[0]) == 0
        assert await complete(client, PROMPT) == 0


async def test_requests_during_a_restart_end_without_events() -> None:
    settings = Settings(decode_tokens_per_second=100)
    async with running(settings) as worker, Client(worker.url) as own:
        running_on = asyncio.create_task(complete(own, PROMPT, generate=20))
        await until(lambda: worker.next_sequence() == 1)
        worker.faults.restart()
        await running_on
        assert worker.next_sequence() == 0
        assert worker.engine.counters.running == worker.engine.counters.in_flight == 0
        assert worker.held_prefix_tokens(PROMPT) == 0


async def test_request_waiting_for_room_runs_after_a_restart() -> None:
    settings = Settings(blocks=3, decode_tokens_per_second=0.2)
    async with running(settings) as worker, Client(worker.url) as own:
        first = asyncio.create_task(complete(own, range(20), generate=10))
        await until(lambda: worker.engine.counters.running == 1)
        second = asyncio.create_task(complete(own, range(50, 67)))
        await until(lambda: worker.engine.counters.in_flight == 2)
        worker.faults.restart()
        await second
        assert not first.done()
        first.cancel()


async def test_silent_replay_socket_answers_no_request(
    worker: SimulatedWorker, client: Client
) -> None:
    await store_block(client)
    await post(client, "/misbehave", {"hide_replay": "silent"})
    async with socket(zmq.DEALER, worker.replay_endpoint) as dealer:
        await ask(dealer)
        assert not await dealer.poll(100)
        await post(client, "/misbehave", {"hide_replay": None})
        await ask(dealer)
        assert await dealer.poll(60_000)


async def test_truncated_replay_stops_half_way(worker: SimulatedWorker, client: Client) -> None:
    await store(client, 4)
    worker.faults.hide_replay("truncated")
    async with socket(zmq.DEALER, worker.replay_endpoint) as dealer, asyncio.timeout(60):
        await ask(dealer)
        assert sequences([await dealer.recv_multipart() for _ in range(2)]) == [0, 1]
        assert not await dealer.poll(100)
    worker.faults.hide_replay(None)
    assert sequences(await replay(worker, 0)) == [0, 1, 2, 3]


async def test_absent_replay_socket_refuses_until_it_returns(
    worker: SimulatedWorker, client: Client
) -> None:
    await store_block(client)
    endpoint = worker.replay_endpoint
    assert endpoint is not None
    port = int(endpoint.rpartition(":")[2])
    worker.faults.hide_replay("absent")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    worker.faults.restart()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    worker.faults.hide_replay(None)
    await store_block(client)
    assert sequences(await replay(worker, 0)) == [0]


async def test_hidden_events_are_refused_and_kept_while_the_worker_serves(
    worker: SimulatedWorker, client: Client
) -> None:
    assert worker.events_endpoint is not None
    port = int(worker.events_endpoint.rpartition(":")[2])
    await post(client, "/misbehave", {"hide_events": True})
    worker.faults.restart()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    await store(client, 2)
    assert sequences(await replay(worker, 0)) == [0, 1]
    await post(client, "/misbehave", {"hide_events": False})
    async with subscribed(worker, client) as sub:
        start = worker.next_sequence()
        await store_block(client)
        assert sequences(await received(sub, 1)) == [start]


async def test_faults_of_one_rank_spare_the_others() -> None:
    async with running(Settings(ranks=2, misbehave=True)) as worker, Client(worker.url) as own:
        await post(own, "/misbehave", {"lose": 1, "rank": 1})
        for rank in ("0", "1"):
            await store_block(own, **{"X-data-parallel-rank": rank})
        assert [len(await replay(worker, 0, rank=rank)) for rank in (0, 1)] == [1, 0]
        await post(own, "/misbehave", {"restart": True, "rank": 1})
        assert [worker.next_sequence(rank) for rank in (0, 1)] == [1, 0]


async def test_faults_of_a_worker_without_events_do_nothing() -> None:
    settings = Settings(events_endpoint=None, replay_endpoint=None)
    async with running(settings) as worker, Client(worker.url) as own:
        await complete(own, PROMPT)
        worker.faults.garbage(3)
        worker.faults.hide_replay("absent")
        worker.faults.hide_events(hidden=True)
        worker.faults.restart()
        assert worker.next_sequence() == worker.held_prefix_tokens(PROMPT) == 0


@pytest.mark.parametrize(
    "body",
    [
        {"unknown": 1},
        {"drop": -1},
        {"garbage": 10**9},
        {"corrupt": "all"},
        {"hide_replay": "gone"},
        {"rank": 1, "drop": 1},
    ],
)
async def test_unknown_fault_is_refused(client: Client, body: Any) -> None:
    assert (await client.post("/misbehave", json=body)).status == 400


async def test_cache_route_lists_the_held_blocks(worker: SimulatedWorker, client: Client) -> None:
    await complete(client, PROMPT, cache_salt="s", model="ad-a")
    listed = await (await client.get("/cache")).json()
    assert listed == [{"rank": 0, "blocks": 1, "host_blocks": 0, "next_sequence": 1}]
    tokens = {"tokens": list(PROMPT)}
    for namespace, held in (({}, 0), ({"salt": "s", "lora": "ad-a"}, 16)):
        assert await post(client, "/cache/prefix", tokens | namespace) == {"held_tokens": held}
    assert worker.held_prefix_tokens(PROMPT, "s", "ad-a") == 16
    for wrong in ({"lora": "no"}, {"rank": 1}, {"tokens": "x"}, {"tokens": [-1]}):
        assert (await client.post("/cache/prefix", json=tokens | wrong)).status == 400


async def test_held_prefix_equals_the_hit_of_a_request(
    worker: SimulatedWorker, client: Client
) -> None:
    for length in (40, 33, 32, 17, 16, 1, 64):
        prompt = range(length)
        assert worker.held_prefix_tokens(prompt) == await complete(client, prompt, generate=3)


def test_lose_precedes_drop_and_drop_precedes_duplicate() -> None:
    interference = Interference(drop=1, lose=1, duplicate=1)
    assert [interference.fate() for _ in range(4)] == [
        Fate(is_kept=False, sent=0),
        Fate(is_kept=True, sent=0),
        Fate(is_kept=True, sent=2),
        Fate(is_kept=True, sent=1),
    ]


def test_reordered_batch_is_dropped_with_its_incarnation() -> None:
    interference = Interference(reorder=True)
    assert interference.ordered([(b"1",)]) == []
    assert interference.ordered([]) == []
    assert interference.forget() == [(b"1",)]
    assert interference.ordered([(b"2",)]) == []
    assert interference.ordered([(b"3",)]) == [(b"3",), (b"2",)]
    assert interference.ordered([(b"4",)]) == [(b"4",)]
