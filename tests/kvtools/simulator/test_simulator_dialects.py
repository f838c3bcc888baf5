"""Every dialect against recordings and against the tables of its engine's releases."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvtools.simulator import publisher
from kvtools.simulator.dialects import DIALECTS, EventLayout
from kvtools.simulator.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings
from tests.kvtools.simulator.readers import (
    Client,
    complete,
    events_of,
    post,
    published,
    replay,
    subscribed,
)

Recording = Callable[[str], list[dict[str, Any]]]

PROMPT = range(100, 117)
STORED = BlockStored(
    block_hashes=(7,),
    parent_block_hash=6,
    token_ids=(1, 2),
    block_size=2,
    lora_id=1,
    medium="GPU",
    lora_name="ad",
    extra_keys=(("ad", "salt"),),
    group_idx=0,
    kv_cache_spec_kind="full_attention",
    session_id="s",
    cache_salt="salt",
)


def events_in(payload: bytes) -> list[Event]:
    """The events of a recorded batch of maps."""
    events = msgspec.msgpack.decode(payload)[1]
    filled = [event | {"lora_name": event.get("lora_name")} for event in events]
    return msgspec.convert(filled, list[Event])


def encoded_again(payload: bytes, layout: EventLayout) -> bytes:
    timestamp, _, rank = msgspec.msgpack.decode(payload)
    return publisher.batch(timestamp, layout.encode(events_in(payload)), rank)


@pytest.mark.parametrize(
    ("dialect", "maps", "recorded_as"),
    [
        ("vllm-0.9", "vllm_0.32.0_w1", "transcoded_vllm_0.9.2"),
        ("vllm-0.14", "vllm_0.32.0_w1", "transcoded_vllm_0.16.0"),
        ("vllm-0.20", "vllm_0.32.0_w1", "transcoded_vllm_0.20.0"),
        ("vllm-0.22", "vllm_0.32.0_w1", "transcoded_vllm_0.23.0"),
        ("sglang-0.4", "sglang_0.5.23_radix", "transcoded_sglang_0.5.2"),
        ("sglang-0.5.9", "sglang_0.5.23_radix", "transcoded_sglang_0.5.18"),
        ("sglang-0.5.22", "sglang_0.5.23_radix", "sglang_0.5.23_radix"),
    ],
)
def test_dialect_encodes_recorded_events_to_the_recorded_bytes(
    recording: Recording, dialect: str, maps: str, recorded_as: str
) -> None:
    compared = 0
    for source, wanted in zip(recording(maps), recording(recorded_as), strict=True):
        for payload, expected in zip(source["payloads"], wanted["payloads"], strict=True):
            assert encoded_again(payload, DIALECTS[dialect].layout) == expected
            compared += 1
    assert compared > 10


FIELDS = ["BlockStored", [7], 6, [1, 2], 2]
MAP = {
    "type": "BlockStored",
    "block_hashes": [7],
    "parent_block_hash": 6,
    "token_ids": [1, 2],
    "block_size": 2,
}
NAMED = {"extra_keys": [["ad", "salt"]], "group_idx": 0, "kv_cache_spec_kind": "full_attention"}


@pytest.mark.parametrize(
    ("dialect", "wanted"),
    [
        ("vllm-0.9", [*FIELDS, 1]),
        ("vllm-0.10", [*FIELDS, 1, "GPU"]),
        ("vllm-0.14", [*FIELDS, 1, "GPU", "ad"]),
        ("vllm-0.17", [*FIELDS, 1, "GPU", "ad", [["ad", "salt"]]]),
        ("vllm-0.20", [*FIELDS, 1, "GPU", "ad", [["ad", "salt"]], 0]),
        ("vllm-0.22", [*FIELDS, 1, "GPU", "ad", [["ad", "salt"]], 0, "full_attention", None]),
        ("vllm-0.24", MAP | {"lora_id": 1, "medium": "GPU", "lora_name": "ad"} | NAMED),
        ("vllm-0.26", MAP | {"lora_id": 1, "medium": "GPU", "lora_name": "ad"} | NAMED),
        (
            "vllm-0.32",
            MAP | {"lora_id": 1, "medium": "GPU", "lora_name": "ad", **NAMED, "session_id": "s"},
        ),
        ("sglang-0.4", [*FIELDS, None]),
        ("sglang-0.5.9", [*FIELDS, None, "GPU"]),
        ("sglang-0.5.18", [*FIELDS, None, "GPU", {"cache_salt": "salt"}]),
        (
            "sglang-0.5.20",
            MAP | {"lora_id": None, "medium": "GPU", "cache_salt": "salt", "session_id": "s"},
        ),
        (
            "sglang-0.5.22",
            MAP
            | {"lora_id": None, "medium": "GPU", "cache_salt": "salt"}
            | {"session_id": "s", "lora_name": "ad"},
        ),
        ("trtllm", MAP | {"lora_id": 1, "medium": "GPU", "lora_name": None}),
    ],
)
def test_stored_block_has_the_fields_of_the_dialect(dialect: str, wanted: object) -> None:
    written = msgspec.msgpack.encode(DIALECTS[dialect].layout.encode([STORED])[0])
    assert msgspec.msgpack.decode(written) == wanted


def test_sglang_arrays_without_a_salt_have_no_map_at_the_end() -> None:
    unsalted = msgspec.structs.replace(STORED, cache_salt=None)
    assert len(DIALECTS["sglang-0.5.18"].layout.encode([unsalted])[0]) == 7


@pytest.mark.parametrize("dialect", DIALECTS)
def test_removals_and_clears_are_written_in_every_dialect(dialect: str) -> None:
    layout = DIALECTS[dialect].layout
    removed, cleared = layout.encode([BlockRemoved((7,), "GPU", 0), AllBlocksCleared()])
    if layout.positional:
        assert cleared == ["AllBlocksCleared"]
        assert isinstance(removed, list)
        assert removed == ["BlockRemoved", (7,), "GPU", 0][: len(removed)]
    else:
        assert cleared == {"type": "AllBlocksCleared"}
        assert isinstance(removed, dict)
        assert removed["block_hashes"] == (7,)
        assert removed["medium"] == "GPU"


def test_sglang_joins_consecutive_removals_into_one_event() -> None:
    events = [
        BlockRemoved((1,), "GPU"),
        BlockRemoved((2,), "GPU"),
        BlockRemoved((3,), "CPU_PINNED"),
    ]
    written = DIALECTS["sglang-0.5.9"].layout.encode(events)
    assert written == [["BlockRemoved", (1, 2), "GPU"], ["BlockRemoved", (3,), "CPU_PINNED"]]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_worker_of_every_dialect_publishes_and_replays(dialect: str) -> None:
    known = DIALECTS[dialect]
    async with running(Settings(dialect=dialect, topic="kv")) as worker, Client(worker.url) as own:
        async with subscribed(worker, own) as sub:
            await complete(own, PROMPT)
            live = await sub.recv_multipart()
        assert await complete(own, PROMPT) == 16 == worker.held_prefix_tokens(PROMPT)
        replayed = await replay(worker, int.from_bytes(live[1], "big"))
        assert replayed[0] == ([b"", *live] if known.replay_topic else [b"", *live[1:]])
        stored = events_of(live)[0]
        tokens = stored[3] if known.layout.positional else stored["token_ids"]
        assert tokens == list(PROMPT)[:16]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_worker_names_its_engine_and_release_as_the_engine_does(dialect: str) -> None:
    path = "/server_info" if DIALECTS[dialect].engine == "sglang" else "/version"
    other = "/version" if path == "/server_info" else "/server_info"
    owner = {"trtllm": "tensorrt_llm"}.get(DIALECTS[dialect].engine, DIALECTS[dialect].engine)
    async with running(Settings(dialect=dialect)) as worker, Client(worker.url) as own:
        named = await (await own.get(path)).json()
        assert named["version"] == DIALECTS[dialect].version
        assert (await own.get(other)).status == 404
        cards = (await (await own.get("/v1/models")).json())["data"]
        assert [card["owned_by"] for card in cards] == [owner]


async def test_worker_names_the_release_that_it_is_given() -> None:
    settings = Settings(dialect="sglang-0.5.22", engine_version="0.5.99")
    async with running(settings) as worker, Client(worker.url) as own:
        assert (await (await own.get("/server_info")).json())["version"] == "0.5.99"


@pytest.mark.parametrize(("dialect", "equal"), [("vllm-0.26", False), ("vllm-0.32", True)])
async def test_hashes_of_older_vllm_differ_between_processes(dialect: str, *, equal: bool) -> None:
    hashes: list[object] = []
    async with running(Settings(dialect=dialect)) as worker, Client(worker.url) as own:
        for _ in range(2):
            await complete(own, PROMPT)
            hashes.append((await published(worker))[0]["block_hashes"])
            worker.faults.restart()
    assert (hashes[0] == hashes[1]) == equal


@pytest.mark.parametrize(
    ("dialect", "paths"),
    [
        ("vllm-0.26", set()),
        ("vllm-0.32", {"/kv_event_sources"}),
        ("sglang-0.5.9", {"/server_info", "/get_server_info"}),
        ("trtllm", set()),
    ],
)
async def test_event_routes_are_those_of_the_dialect(dialect: str, paths: set[str]) -> None:
    async with running(Settings(dialect=dialect)) as worker, Client(worker.url) as own:
        for path in ("/kv_event_sources", "/server_info", "/get_server_info"):
            assert (await own.get(path)).status == (200 if path in paths else 404), path
        for path in ("/misbehave", "/cache/prefix", "/kv_cache_events"):
            found = dialect == "trtllm" and path == "/kv_cache_events"
            assert (await own.post(path, json={})).status == (200 if found else 404), path


async def test_sglang_announces_ports_topic_and_block_size() -> None:
    settings = Settings(dialect="sglang-0.5.22", topic="kv", block_size_tokens=8)
    async with running(settings) as worker, Client(worker.url) as own:
        answer = (await (await own.get("/server_info")).json())["kv_events"]
        assert worker.events_endpoint == f"tcp://127.0.0.1:{answer.pop('endpoint_port_base')}"
        assert (
            worker.replay_endpoint == f"tcp://127.0.0.1:{answer.pop('replay_endpoint_port_base')}"
        )
        assert answer == {
            "publisher": "zmq",
            "endpoint_host": "127.0.0.1",
            "topic": "kv",
            "block_size": 8,
            "dp_size": 1,
        }


@pytest.mark.parametrize(
    ("endpoint", "answer"),
    [(None, None), ("tcp://*:0", "*")],
)
async def test_sglang_announces_a_wildcard_or_nothing(
    endpoint: str | None, answer: str | None
) -> None:
    settings = Settings(dialect="sglang-0.5.22", events_endpoint=endpoint, replay_endpoint=None)
    async with running(settings) as worker, Client(worker.url) as own:
        events = (await (await own.get("/get_server_info")).json())["kv_events"]
        assert (events and events["endpoint_host"]) == answer
        assert not events or "replay_endpoint_port_base" not in events


async def test_reset_is_announced_with_the_next_step_by_vllm_and_at_once_by_others() -> None:
    for dialect, path, batches in (
        ("vllm-0.22", "/reset_prefix_cache", 1),
        ("sglang-0.5.22", "/flush_cache", 3),
        ("trtllm", "/reset_prefix_cache", 2),
    ):
        async with running(Settings(dialect=dialect)) as worker, Client(worker.url) as own:
            await complete(own, PROMPT)
            assert await post(own, path, {}) == {"success": True}
            assert worker.next_sequence() == batches, dialect
            assert worker.held_prefix_tokens(PROMPT) == 0
