"""The compiled core alone: hostile arguments and messages, and its agreement with typed events."""

import base64
import json
import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.core import Core
from kvstate.errors import WireError
from kvstate.events import BlocksStored, Tokens
from kvstate.index import Index
from kvstate.overlap import Overlap
from kvstate.zmq_wire import decode_batch
from tests.kvstate.cores import needs_compiled_core, new_core

_core = pytest.importorskip("kvstate._core", reason="no C compiler at installation")
pytestmark = needs_compiled_core

RECORDINGS = sorted((Path(__file__).parent.parent / "wire").glob("*vllm*.jsonl"))
MUTATIONS = 40


def payloads(recording: Path) -> list[bytes]:
    entries = map(json.loads, recording.read_text().splitlines())
    frames = [frame for entry in entries for frame in entry.get("frames") or []]
    return [base64.b64decode(frame["payload_b64"]) for frame in frames]


def core_with_owner() -> tuple[Core, int]:
    core = new_core(compiled=True, limit_blocks=100_000)
    owner = core.add_owner(0, core.add_model(b"m"))
    core.trust(owner, True)  # noqa: FBT003
    return core, owner


def carries_more_than_tokens(payload: bytes) -> bool:
    """Salted blocks, and adapters known by number only, are the typed decoder's."""
    stored = [one for one in decode_batch(payload).events if isinstance(one, BlocksStored)]
    return any(one.extras or isinstance(one.lora, int) for one in stored)


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_messages_take_the_fast_path(recording: Path) -> None:
    core, owner = core_with_owner()
    recorded = payloads(recording)
    assert recorded
    for payload in recorded:
        assert (core.apply(owner, payload) is None) == carries_more_than_tokens(payload)
    core.check()


def mutated(payload: bytes, rng: random.Random) -> bytes:
    changed = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed))
        kind = rng.randrange(4)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randint(1, 9))
        else:
            changed[at] = rng.choice((0xC0, 0xDC, 0xDD, 0xDF, 0xCF, 0xD3, 0xC4, 0xDB, 0xC1))
        if not changed:
            return bytes(changed)
    return bytes(changed)


def test_mutated_messages_mean_to_the_fast_path_what_they_mean_to_the_typed_one() -> None:
    rng = random.Random(1)
    (recording,) = [path for path in RECORDINGS if path.stem == "vllm_0.32.0_w1"]
    originals = payloads(recording)
    agreed = 0
    for payload in originals:
        for _ in range(MUTATIONS):
            agreed += agrees(originals, mutated(payload, rng))
    assert agreed > 0


def agrees(before: list[bytes], payload: bytes) -> bool:
    """Applies a message to two cores, fast and typed; whether the fast path took it."""
    fast, typed = Index(1, compiled=True), Index(1, compiled=True)
    owners = fast.add("w", 0, "m"), typed.add("w", 0, "m")
    for index, owner in zip((fast, typed), owners, strict=True):
        for known in before[:2]:
            index.apply(owner, decode_batch(known).events)
    try:
        batch = decode_batch(payload)
    except WireError:
        assert fast._core.apply(owners[0].number, payload) is None
        return False
    taken = fast._core.apply(owners[0].number, payload)
    fast.check()
    if taken is None or taken[0] != taken[1]:
        return False
    typed.apply(owners[1], batch.events)
    assert not batch.faults
    assert owners[0].blocks == owners[1].blocks
    assert owners[0].counts == owners[1].counts
    assert taken[2] == batch.clears
    return True


@given(st.binary(max_size=400))
def test_any_bytes_are_taken_or_left(payload: bytes) -> None:
    core, owner = core_with_owner()
    taken = core.apply(owner, payload)
    assert taken is None or taken[0] <= taken[1]
    core.check()


def event(**fields: Any) -> bytes:
    stored = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5],
        "block_size": 1, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    return msgspec.msgpack.encode([1.0, [stored | fields], 0])


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 0},
        {"block_size": 70_000},
        {"token_ids": [5, 6]},
        {"token_ids": [-1]},
        {"token_ids": [2**32]},
        {"token_ids": [[1, 2]]},
        {"token_ids": []},
        {"block_hashes": []},
        {"block_hashes": [1.5]},
        {"medium": "SOMEWHERE"},
        {"medium": "gpu"},
        {"lora_id": 7},
        {"extra_keys": [["salt"]]},
        {"extra_keys": [None, None]},
        {"kv_cache_spec_kind": "mamba"},
        {"locality": "REMOTE"},
        {"group_idx": -1},
        {"type": "BlockMoved"},
    ],
)
def test_surprising_events_are_left_to_the_typed_decoder(fields: dict[str, Any]) -> None:
    core, owner = core_with_owner()
    assert core.apply(owner, event(**fields)) is None
    assert core.status(owner)["blocks"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"block_hashes": [2**64 - 1]},
        {"block_hashes": [-1]},
        {"block_hashes": [b"x" * 32]},
        {"medium": None},
        {"lora_name": "a", "lora_id": 1, "extra_keys": [["a"]]},
        {"extra_keys": [None]},
        {"kv_cache_spec_kind": "full_attention", "group_idx": 0, "locality": "LOCAL"},
        {"something_new": {"deep": [[[{}]]], "text": "x" * 300}},
    ],
)
def test_expected_events_are_applied_at_once(fields: dict[str, Any]) -> None:
    core, owner = core_with_owner()
    assert core.apply(owner, event(**fields)) == (1, 1, False)
    assert core.status(owner)["blocks"] == 1


def test_deep_nesting_and_huge_lengths_are_harmless() -> None:
    core, owner = core_with_owner()
    for payload in (
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\x91" * 100_000,
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb"
        + bytes(8)
        + b"\x91\x82\xa4type\xabBlockStored\xacblock_hashes\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x90" + b"\xdf\xff\xff\xff\xff",
        event() + b"\x00",
        b"x" * (9 << 20),
    ):
        assert core.apply(owner, payload) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda core: core.status(99),
        lambda core: core.status(-1),
        lambda core: core.add_owner(0, 99),
        lambda core: core.add_owner(2**40, 0),
        lambda core: core.apply(0),
        lambda core: core.apply(0, "text"),
        lambda core: core.remove(0, 1, "NOWHERE", None),
        lambda core: core.remove(0, "hash", "GPU", None),
        lambda core: core.overlaps(99, Tokens("I"), None, None, []),
        lambda core: core.overlaps(0, b"abcd", None, None, []),
        lambda core: core.overlaps(0, array("d", [1.0]), None, None, []),
        lambda core: core.overlaps(0, memoryview(b"123456789")[1:], None, None, []),
        lambda core: core.store(0, [1], None, Tokens("I", [1, 2]), 1, None, None, "GPU", None),
        lambda core: core.store(0, [1], None, Tokens("I", [1]), 0, None, None, "GPU", None),
        lambda core: core.store(0, [1], None, Tokens("I", [1]), 1, None, [], "GPU", None),
        lambda core: core.store(0, (1,), None, Tokens("I", [1]), 1, None, None, "GPU", None),
        lambda core: core.store(0, [1], None, Tokens("I", [1]), 1, 1.5, None, "GPU", None),
        lambda core: core.store(0, [1], None, Tokens("I", [1]), 1, None, None, None, None),
    ],
)
def test_wrong_arguments_are_refused(call: Any) -> None:
    core, _ = core_with_owner()
    with pytest.raises((TypeError, ValueError, OverflowError, SystemError)):
        call(core)
    core.check()


def test_what_is_no_tuple_cannot_be_an_overlap() -> None:
    with pytest.raises(TypeError, match="overlaps must be tuples"):
        _core.CompiledCore(1, 1, dict)


def test_names_must_cover_the_workers_that_hold_something() -> None:
    core, owner = core_with_owner()
    core.store(owner, [1], None, Tokens("I", [1]), 1, None, None, "GPU", None)
    with pytest.raises(IndexError):
        core.overlaps(0, Tokens("I", [1, 9]), None, None, [])


def test_many_owners_share_and_leave_a_block() -> None:
    core = new_core(compiled=True)
    model = core.add_model(b"m")
    owners = [core.add_owner(worker, model) for worker in range(300)]
    names = [str(worker) for worker in range(300)]
    for owner in owners:
        core.trust(owner, True)  # noqa: FBT003
        core.store(owner, [1], None, Tokens("I", [1]), 1, None, None, "GPU", None)
    found = core.overlaps(model, Tokens("I", [1, 9]), None, None, names)
    assert found == dict.fromkeys(names, Overlap(1, (1, 0, 0, 0)))
    for owner in random.Random(1).sample(owners, 299):
        core.remove_owner(owner)
        core.check()
    assert len(core.overlaps(model, Tokens("I", [1, 9]), None, None, names)) == 1


def test_hashes_chosen_to_meet_in_one_slot_stay_apart() -> None:
    core, owner = core_with_owner()
    hashes: list[Any] = [number << 40 for number in range(20_000)]
    core.store(owner, hashes, None, Tokens("I", range(20_000)), 1, None, None, "GPU", None)
    assert core.status(owner)["blocks"] == len(hashes)
    for block in hashes:
        assert core.remove(owner, block, "GPU", None)
    assert core.status(owner)["blocks"] == 0
    core.check()
