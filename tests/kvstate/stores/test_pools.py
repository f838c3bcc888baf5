"""Stores of LMCache and Mooncake: recorded events that name them by medium, and a pool's own."""

import base64
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstate.errors import WireError
from kvstate.events import EventBatch
from kvstate.index.index import Index
from kvstate.overlap import Prompt
from kvstate.steps import finished
from kvstate.stores.pools import MAX_LOOKS, Pool
from kvstate.stores.stores import StoreRules, Stores
from kvstate.wire.mooncake_wire import MAX_KEY, PoolBlock, decoding_pool

HERE = Path(__file__).parent
DIGEST = "ab" * 32
VLLM_KEY = f"p@m@tp_rank:1@pcp0@dcp0@pp_rank:0@group:2@{DIGEST}"


class PooledFleet:
    """Two workers that mount a store, whose events of host memory lie in it; and its pool."""

    def __init__(self) -> None:
        self.index = Index(12345678)
        rules = [StoreRules("s", frozenset("ab"), media=frozenset({"CPU"}))]
        self.stores = Stores(self.index, rules)
        self.pool = self.stores.pool("s")
        self.ranks = {name: self.index.add(name, 0, "m") for name in "ab"}
        for name, rank in self.ranks.items():
            rank.trusted = True
            self.stores.attach(name, rank)

    def apply(self, publisher: str, payload: bytes) -> tuple[str, ...]:
        if publisher == "pool":
            return finished(self.pool.applying(payload)).faults
        return finished(self.ranks[publisher].applying(payload)).faults

    def stored(self, tokens: list[int], salt: str | None = None) -> int:
        prompt = Prompt("m", array("I", tokens), salt=salt)
        return sum(one.tokens for one in self.stores.stored(prompt))

    def overlap(self, worker: str, tokens: list[int]) -> tuple[int, ...]:
        found = self.index.overlaps(Prompt("m", array("I", tokens))).get(worker)
        return (0, 0, 0, 0) if found is None else tuple(found.tiers)


def recorded(name: str) -> Iterator[dict[str, Any]]:
    with (HERE / f"{name}.jsonl").open() as lines:
        for record in map(json.loads, lines):
            if record["kind"] == "frame":
                yield record | {"payload": base64.b64decode(record["payload_b64"])}


def test_recorded_chunks_of_lmcache_count_for_all_and_not_as_a_workers_own() -> None:
    fleet, prompts, seen = PooledFleet(), dict[str, list[int]](), []
    for record in recorded("lmcache_0.5.6_mp"):
        prompts.setdefault(record["worker"], record.get("prompt_token_ids", []))
        assert fleet.apply(record["worker"], record["payload"]) == ()
        seen.append([fleet.stored(tokens) for tokens in prompts.values()])
    # b's first 256 tokens are a's; the last event is a removal
    assert seen == [[0], [512], [512, 256], [512, 512], [512, 256]]
    assert fleet.overlap("a", prompts["a"]) == (37, 0, 0, 0)
    assert fleet.ranks["a"].block_size == 16
    fleet.index.check()


@pytest.mark.parametrize("sources", [{"pool"}, {"connector"}, {"pool", "connector"}])
def test_recorded_blocks_of_mooncake_are_those_that_workers_hold(sources: set[str]) -> None:
    fleet, prompts, salts = (
        PooledFleet(),
        dict[str, list[int]](),
        dict[str, str | None](),
    )
    faults: list[str] = []
    for record in recorded("vllm_0.32.0_mooncake"):
        name = record["worker"]
        if name != "pool":
            prompts[name], salts[name] = record["prompt_token_ids"], record.get("salt")
        source = "pool" if name == "pool" else "connector"
        if ("connector" in record["scenario"] or name == "pool") and source not in sources:
            continue
        faults += fleet.apply(name, record["payload"])
    first = 48 if "pool" in sources else 96  # the pool removed the fourth block
    assert fleet.stored(prompts["a"]) == first
    assert fleet.stored(prompts["b"], salts["b"]) == 96
    assert fleet.stored(prompts["b"]) == 48  # what it shares with a's, which has no salt
    assert faults == (["unknown_key"] * 3 if "pool" in sources else [])
    assert fleet.overlap("a", prompts["a"]) == (6, 0, 0, 0)
    fleet.index.check()


def message(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1_795_536_154_518, list(events), 0])


def pooled(kind: str = "stored", key: object = VLLM_KEY, medium: object = "cpu") -> dict[str, Any]:
    return {"event_type": kind, "object_key": key, "medium": medium}


def engine_event(block: int, medium: str, **more: Any) -> dict[str, Any]:
    fields = {"block_hashes": [block], "parent_block_hash": None, "token_ids": [block]}
    return (
        {"type": "BlockStored", "block_size": 1, "lora_id": None, "medium": medium} | fields | more
    )


def key_of(block: int) -> str:
    return f"m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{block:064x}"


def test_block_of_a_pool_waits_for_the_worker_that_names_it() -> None:
    fleet = PooledFleet()
    fleet.apply("pool", message(pooled(key=key_of(1)), pooled(key=key_of(9))))
    assert fleet.stored([1, 2]) == 0
    fleet.apply("a", message(engine_event(1, "GPU", group_idx=0)))
    for _ in range(MAX_LOOKS):
        fleet.apply("pool", message())
    assert fleet.stored([1, 2]) == 1
    assert fleet.pool.counts == {"stored": 1, "unknown_block": 1}


def test_waiting_blocks_of_a_pool_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstate.stores.pools.MAX_WAITING", 2)
    fleet = PooledFleet()
    fleet.apply("pool", message(*(pooled(key=key_of(block)) for block in range(1, 5))))
    assert fleet.pool.counts == {"unknown_block": 2}
    for block in range(1, 5):
        fleet.apply("a", message(engine_event(block, "GPU", group_idx=0)))
    fleet.apply("pool", message(pooled("removed", key_of(4))))
    assert fleet.pool.counts == {"unknown_block": 2, "stored": 2, "removed": 1}


def test_block_of_a_pool_that_is_removed_while_it_waits_is_not_stored() -> None:
    fleet = PooledFleet()
    fleet.apply("pool", message(pooled(key=key_of(1)), pooled("removed", key_of(1))))
    fleet.apply("a", message(engine_event(1, "GPU", group_idx=0)))
    fleet.apply("pool", message())
    assert fleet.pool.counts == {}


def test_restart_of_a_pool_empties_it_and_a_hole_does_not() -> None:
    fleet = PooledFleet()
    fleet.apply("a", message(engine_event(1, "GPU", group_idx=0)))
    fleet.apply("pool", message(pooled(key=key_of(1))))
    finished(fleet.pool.demoting())
    fleet.pool.trust(trusted=False)
    assert fleet.stored([1, 2]) == 1
    assert finished(fleet.pool.applying(EventBatch(1.0, []))).faults == ()
    finished(fleet.pool.forgetting())
    assert fleet.stored([1, 2]) == 0


def test_pool_of_an_unknown_store_holds_nothing() -> None:
    fleet = PooledFleet()
    pool: Pool = fleet.stores.pool("other")
    fleet.apply("a", message(engine_event(1, "GPU", group_idx=0)))
    finished(pool.applying(message(pooled(key=key_of(1)), pooled("removed", key_of(1)))))
    assert pool.counts == {}


def test_chunk_of_lmcache_without_its_parent_is_counted_and_not_stored() -> None:
    fleet = PooledFleet()
    fleet.apply("a", message(engine_event(7, "cpu", parent_block_hash=0)))
    assert fleet.ranks["a"].is_special  # its messages are looked at one by one
    assert fleet.ranks["a"].counts == {"chunk_without_parent": 1}
    assert list(fleet.stores.blocks()) == [("s", 0)]


INT = int.from_bytes(bytes.fromhex(DIGEST)[-8:], "big")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (pooled(), PoolBlock(True, (INT, bytes.fromhex(DIGEST)), "CPU", 2)),
        (
            pooled("removed", medium="disk"),
            PoolBlock(False, (INT, bytes.fromhex(DIGEST)), "DISK", 2),
        ),
        (pooled(key=f"{DIGEST}_0_k"), PoolBlock(True, (INT,), "CPU", None)),
        (pooled(key=f"{DIGEST}_0_1_v"), PoolBlock(True, (INT,), "CPU", None)),
        (pooled(key="12345"), "unknown_key"),
        (pooled(key=5), "unknown_key"),
        (pooled(key="x" * (MAX_KEY + 1)), "unknown_key"),
        (pooled(key=VLLM_KEY + "0"), "unknown_key"),
        (pooled("cleared"), "unknown_event"),
        (pooled(medium="tape"), "unknown_medium"),
        (["stored", VLLM_KEY], "malformed_event"),
    ],
)
def test_event_of_a_pool_names_a_block_or_is_counted(
    event: object, expected: PoolBlock | str
) -> None:
    blocks, faults = finished(decoding_pool(message(event)))
    assert [*blocks, *faults] == [expected]


def test_payload_of_a_pool_that_is_none_is_refused() -> None:
    fleet = PooledFleet()
    with pytest.raises(WireError):
        fleet.apply("pool", b"\xff")
