"""The core alone: hostile arguments and messages, and its agreement with typed events."""

import base64
import json
import random
from array import array
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import WireError
from kvstate.events import BlocksRemoved, BlocksStored
from kvstate.index.core import NEW_COPIES, Core, StoreResult
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.overlap import Extra, Overlap, Prompt, Tokens
from kvstate.steps import finished
from kvstate.wire.zmq_wire import decode_batch
from tests.kvstate.cores import new_core
from tests.oracles.plain_index import PlainIndex

RECORDINGS = sorted((Path(__file__).parents[2] / "wire").glob("*.jsonl"))
MUTATED = [path for path in RECORDINGS if path.stem in {"vllm_0.32.0_w1", "sglang_0.5.23_radix"}]
MUTATIONS = 20


def payloads(recording: Path) -> list[bytes]:
    entries = map(json.loads, recording.read_text().splitlines())
    frames = [frame for entry in entries for frame in entry.get("frames") or []]
    return [base64.b64decode(frame["payload_b64"]) for frame in frames]


def core_with_owner() -> tuple[Core, int]:
    core = new_core(limit_blocks=100_000)
    owner = core.add_owner(0, core.add_model(b"m"), 0)
    core.trust(owner, True)
    return core, owner


def carries_more_than_tokens(payload: bytes) -> bool:
    """Whether it has what only the typed decoder reads: salts, bigrams, adapters' numbers."""
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


@pytest.mark.parametrize("recording", MUTATED, ids=lambda path: path.stem)
def test_mutated_messages_mean_the_same_on_both_paths(
    recording: Path,
) -> None:
    rng = random.Random(1)
    originals = payloads(recording)
    agreed = 0
    for payload in originals:
        for _ in range(MUTATIONS):
            agreed += agrees(originals, mutated(payload, rng))
    assert agreed > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("recording", MUTATED, ids=lambda path: path.stem)
def test_mutated_feeds_leave_both_cores_alike(recording: Path, seed: int) -> None:
    rng = random.Random(seed)
    native, plain = Index(1), PlainIndex(1)
    owners = native.add("w", 0, "m"), plain.add("w", 0, "m")
    originals = payloads(recording)
    prompts = [prompt for payload in originals for prompt in prompts_of(payload)]
    for payload in originals:
        for message in (payload, hostile(payload, rng), mutated(payload, rng)):
            assert outcome(native, owners[0], message) == outcome(plain, owners[1], message)
        asked = rng.sample(prompts, min(len(prompts), 10))
        assert [native.overlaps(one) for one in asked] == [plain.overlaps(one) for one in asked]
    native.check()
    plain.check()


def prompts_of(payload: bytes) -> list[Prompt]:
    """Prompts that begin as the chains of a message do."""
    stored = [one for one in decode_batch(payload).events if isinstance(one, BlocksStored)]
    return [
        Prompt("m", Tokens("I", [*first_token(one), *one.tokens, 1, 1]), lora, salt)
        for one in stored
        for lora in (None, one.lora)
        for salt in (None, "tenant-A")
        if not isinstance(lora, int)
    ]


def first_token(stored: BlocksStored) -> Extra:
    """The first token of bigrams, which comes before their second tokens."""
    return stored.extras[0][:1] if stored.bigrams and stored.extras else ()


def outcome(index: Index, owner: Owner, payload: bytes) -> object:
    """The visible effects of a message; its result is None if it is refused."""
    try:
        applied = finished(owner.applying(payload))
    except WireError:
        applied = None
    owner.trusted = True
    tiers = index.blocks_by_tier("w")
    return applied, owner.status["blocks"], owner.counts, len(owner.orphans), tiers


# Values that a field may get.
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**63,
    2**64 - 1,
    1.5,
    float("nan"),
    "",
    "REMOTE",
    "LOCAL",
    "kvcr",
    "CPU",
    "DISK",
    "TAPE",
    "mamba",
    "full_attention",
    b"",
    b"h" * 32,
    [],
    [None],
    [[]],
    {},
    [1],
    [1, 2],
    [[1, 2], [2, 3]],
    {"cache_salt": "s"},
    [{"hash": "i"}],
    ["s"],
    [["s"]],
)
FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "locality",
    "ownership",
    "cache_salt",
    "mm_keys",
    "session_id",
    "type",
    "brand_new",
)


def hostile(payload: bytes, rng: random.Random) -> bytes:
    """The same message with fields of its events replaced or added, and some events repeated."""
    timestamp, events, *rank = msgspec.msgpack.decode(payload)
    events = [*events, *rng.sample(events, rng.randint(0, len(events)))]
    for event in events:
        for _ in range(rng.randint(0, 2)):
            if isinstance(event, dict):
                event[rng.choice(FIELDS)] = rng.choice(ODD_VALUES)
            else:
                event[rng.randrange(len(event))] = rng.choice(ODD_VALUES)
    return msgspec.msgpack.encode([timestamp, events, *rank])


def agrees(before: list[bytes], payload: bytes) -> bool:
    """Applies a message to two cores, fast and typed; returns whether the fast path took it."""
    fast, typed = Index(1), Index(1)
    owners = fast.add("w", 0, "m"), typed.add("w", 0, "m")
    for index, owner in zip((fast, typed), owners, strict=True):
        for known in before[:2]:
            index.apply(owner, decode_batch(known).events)
    try:
        batch = decode_batch(payload)
    except WireError:
        assert fast.core.apply(owners[0].number, payload) is None
        return False
    taken = fast.core.apply(owners[0].number, payload)
    fast.check()
    if taken is None or taken[0] != taken[1]:
        return False
    faults = typed.apply(owners[1], batch.events)
    assert sorted(taken[3]) == sorted(batch.faults + faults)
    assert not batch.removal_lost
    assert owners[0].blocks == owners[1].blocks
    assert owners[0].counts == owners[1].counts
    assert taken[2] == batch.clears
    return True


@given(st.binary(max_size=400))
def test_core_applies_or_leaves_any_bytes(payload: bytes) -> None:
    core, owner = core_with_owner()
    taken = core.apply(owner, payload)
    assert taken is None or taken[0] <= taken[1]
    core.check()


def nested(levels: int) -> Any:
    value: Any = None
    for _ in range(levels):
        value = [value]
    return value


NESTED = {"deeper": nested(40)}


def event(**fields: Any) -> bytes:
    stored = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5],
        "block_size": 1, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    return msgspec.msgpack.encode([1.0, [stored | fields], 0])


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 70_000},
        {"block_size": None},
        {"block_size": False},
        {"token_ids": [5, 6]},
        {"token_ids": [-1]},
        {"token_ids": [2**63]},
        {"token_ids": [[1, 2]]},
        {"token_ids": [], "block_hashes": None},
        {"token_ids": ["5"]},
        {"block_hashes": []},
        {"block_hashes": [True]},
        {"block_hashes": [1.5]},
        {"medium": "SOMEWHERE"},
        {"medium": "gpu"},
        {"lora_id": 7},
        {"extra_keys": [["salt"]]},
        {"extra_keys": [None, None]},
        {"kv_cache_spec_kind": ["mamba"]},
        {"locality": 7},
        {"ownership": 7},
        {"group_idx": -1},
        {"group_idx": 2**32},
        {"cache_salt": "tenant"},
        {"lora_name": {"cache_salt": "tenant"}},
        {"mm_keys": [[{"type": "mm_key", "hash": "h", "start_offset": 0}]]},
        {"mm_keys": []},
        {"brand_new": {"key": {"of": [b"bytes", {}]}, "deep": [[[[[[[[]]]]]]]] * 9} | NESTED},
        {"type": "BlockMoved"},
    ],
    ids=str,
)
def test_unexpected_events_are_left_to_the_typed_decoder(fields: dict[str, Any]) -> None:
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
        {"something_new": {"deep": [[[{}]]], "text": "x" * 300}, "another": nested(20)},
        {"ownership": "tier-2", "session_id": "s"},
        {"mm_keys": [[]], "cache_salt": None},
        {"mm_keys": [None]},
        {"medium": "DEVICE", "group_idx": 2**32 - 1},
    ],
    ids=str,
)
def test_expected_events_are_applied_by_the_fast_path(fields: dict[str, Any]) -> None:
    core, owner = core_with_owner()
    assert core.apply(owner, event(**fields)) == (1, 1, False, ())
    assert core.status(owner)["blocks"] == 1


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"kv_cache_spec_kind": "mamba", "token_ids": [5, 6, 7]}, "other_attention_group"),
        ({"kv_cache_spec_kind": "unknown", "group_idx": 3}, "other_attention_group"),
        ({"locality": "REMOTE", "kv_cache_spec_kind": "mamba"}, "other_locality"),
        ({"ownership": "kVcR"}, "foreign_ownership"),
    ],
)
def test_unindexed_blocks_stay_on_the_fast_path(fields: dict[str, Any], fault: str) -> None:
    core, owner = core_with_owner()
    assert core.apply(owner, event(**fields)) == (1, 1, False, (fault,))
    assert core.status(owner)["blocks"] == 0


@pytest.mark.parametrize("fields", [{"block_size": 0}, {"token_ids": []}])
def test_placeholders_stay_on_the_fast_path(fields: dict[str, Any]) -> None:
    core, owner = core_with_owner()
    assert core.apply(owner, event(**fields)) == (1, 1, False, ())
    core.apply(owner, event())
    assert core.apply(owner, event(**fields, medium="CPU")) == (1, 1, False, ())
    assert core.tiers(owner, False) == (1, 1, 0, 0)
    assert core.status(owner)["copied_unknown"] == 1


def test_fast_path_stops_before_a_doubtful_group() -> None:
    core, owner = core_with_owner()
    assert core.apply(owner, event(group_idx=0)) == (1, 1, False, ())
    assert core.apply(owner, event(group_idx=1)) == (0, 1, False, ())
    assert core.apply(owner, event(group_idx=0, token_ids=[])) == (0, 1, False, ())


def raw_event(*fields: bytes) -> bytes:
    """A stored event whose map may have a key twice."""
    count = bytes([0x80 + 6 + len(fields) // 2])
    known = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": 8, "token_ids": [5]}
    pairs = [
        encoded(part)
        for pair in (known | {"block_size": 1, "lora_id": None}).items()
        for part in pair
    ]
    return b"\x93\xcb" + bytes(8) + b"\x91" + count + b"".join(pairs) + b"".join(fields) + b"\x00"


def encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize(
    "pairs",
    [
        [("medium", "CPU"), ("medium", None)],
        [("group_idx", 3), ("group_idx", None)],
        [("parent_block_hash", None)],
        [("block_hashes", [2]), ("token_ids", [6])],
        [("token_ids", [6]), ("token_ids", [7])],
        [("kv_cache_spec_kind", "mamba"), ("kv_cache_spec_kind", None)],
        [("locality", "REMOTE"), ("locality", None)],
        [("ownership", "kvcr"), ("ownership", "engine")],
        [("lora_name", "a"), ("lora_name", None), ("extra_keys", [["a"]])],
        [("extra_keys", [["a"]]), ("extra_keys", None)],
        [("type", "BlockRemoved")],
    ],
    ids=str,
)
def test_repeated_field_means_the_last_one(pairs: list[tuple[str, Any]]) -> None:
    payload = raw_event(*(encoded(part) for pair in pairs for part in pair))
    assert meaning(payload, Index(1)) == meaning(payload, PlainIndex(1))


def meaning(payload: bytes, index: Index) -> object:
    """What a message leaves behind: on which tiers, by which tokens, in which group."""
    owner = index.add("w", 0, "m")
    index.apply(owner, [BlocksStored([8], None, Tokens("I", [4]), 1)])
    finished(owner.applying(payload))
    asked = [Prompt("m", Tokens("I", [*path, 9])) for path in ([4, 5], [4, 6], [4, 7], [5], [6])]
    found = [index.overlaps(one) for one in asked]
    tiers, counts = index.blocks_by_tier("w"), owner.counts
    index.apply(owner, [BlocksRemoved([1, 2])])  # of no group
    return tiers, counts, found, owner.blocks


def test_deep_nesting_and_huge_lengths_are_harmless() -> None:
    core, owner = core_with_owner()
    for payload in (
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\x91" * 100_000,
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb"
        + bytes(8)
        + b"\x91\x82\xa4type\xabBlockStored\xacblock_hashes\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x90" + b"\xdf\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x90" + b"\x81\x90\xc0",
        b"\x93\xcb" + bytes(8) + b"\x90" + b"\x81\x80\xc0",
        event() + b"\x00",
        b"x" * (9 << 20),
    ):
        assert core.apply(owner, payload) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda core: core.status(99),
        lambda core: core.status(-1),
        lambda core: core.add_owner(0, 99, 0),
        lambda core: core.add_owner(2**40, 0, 0),
        lambda core: core.add_owner(0, 0, 2**40),
        lambda core: core.limit(0, -1),
        lambda core: core.limit(9, 1),
        lambda core: core.limit(0),
        lambda core: core.apply(0),
        lambda core: core.apply(0, "text"),
        lambda core: core.remove(0, 1, "NOWHERE", None),
        lambda core: core.remove(0, "hash", "GPU", None),
        lambda core: core.copy(0, [1], "NOWHERE", None),
        lambda core: core.copy(0, (1,), "GPU", None),
        lambda core: core.copy(0, ["hash"], "GPU", None),
        lambda core: core.copy(9, [1], "GPU", None),
        lambda core: core.admit(0, 2**64, None),
        lambda core: core.admit(0, "group", None),
        lambda core: core.admit(9, 0, None),
        lambda core: core.admission(0, 1.5),
        lambda core: core.layout(9),
        lambda core: core.forget_layout("owner"),
        lambda core: core.overlaps(99, Tokens("I"), None, None, []),
        lambda core: core.overlaps(0, b"abcd", None, None, []),
        lambda core: core.overlaps(0, array("d", [1.0]), None, None, []),
        lambda core: core.overlaps(0, memoryview(b"123456789")[1:], None, None, []),
        lambda core: core.store(
            0, [1], None, Tokens("I", [1, 2]), 1, None, None, "GPU", None, NEW_COPIES
        ),
        lambda core: core.store(
            0, [1], None, Tokens("I", [1]), 0, None, None, "GPU", None, NEW_COPIES
        ),
        lambda core: core.store(
            0, [1], None, Tokens("I", [1]), 1, None, [], "GPU", None, NEW_COPIES
        ),
        lambda core: core.store(
            0, (1,), None, Tokens("I", [1]), 1, None, None, "GPU", None, NEW_COPIES
        ),
        lambda core: core.store(
            0, [1], None, Tokens("I", [1]), 1, 1.5, None, "GPU", None, NEW_COPIES
        ),
        lambda core: core.store(
            0, [1], None, Tokens("I", [1]), 1, None, None, None, None, NEW_COPIES
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Any) -> None:
    core, _ = core_with_owner()
    with pytest.raises((TypeError, ValueError, OverflowError, SystemError)):
        call(core)
    core.check()


def test_overlap_type_must_be_a_tuple() -> None:
    with pytest.raises(TypeError, match="overlaps must be tuples"):
        Core(1, 1, dict)  # type: ignore[arg-type]


def test_overlaps_refuse_names_that_miss_a_holder() -> None:
    core, owner = core_with_owner()
    core.store(owner, [1], None, Tokens("I", [1]), 1, None, None, "GPU", None, NEW_COPIES)
    with pytest.raises(IndexError):
        core.overlaps(0, Tokens("I", [1, 9]), None, None, [])


def test_many_owners_share_and_leave_a_block() -> None:
    core = new_core()
    model = core.add_model(b"m")
    owners = [core.add_owner(worker, model, 0) for worker in range(300)]
    names = [str(worker) for worker in range(300)]
    for owner in owners:
        core.trust(owner, True)
        core.store(owner, [1], None, Tokens("I", [1]), 1, None, None, "GPU", None, NEW_COPIES)
    found = core.overlaps(model, Tokens("I", [1, 9]), None, None, names)
    assert found == dict.fromkeys(names, Overlap(1, (1, 0, 0, 0)))
    for owner in random.Random(1).sample(owners, 299):
        core.remove_owner(owner)
        core.check()
    assert len(core.overlaps(model, Tokens("I", [1, 9]), None, None, names)) == 1


def test_hashes_chosen_to_collide_stay_apart() -> None:
    core, owner = core_with_owner()
    hashes: list[Any] = [number << 40 for number in range(20_000)]
    core.store(
        owner, hashes, None, Tokens("I", range(20_000)), 1, None, None, "GPU", None, NEW_COPIES
    )
    assert core.status(owner)["blocks"] == len(hashes)
    for block in hashes:
        assert core.remove(owner, block, "GPU", None)
    assert core.status(owner)["blocks"] == 0
    core.check()


def test_overlaps_are_equal_to_those_made_in_python_and_hash_alike() -> None:
    core, owner = core_with_owner()
    core.store(owner, [1, 2], None, Tokens("I", [3, 4]), 1, None, None, "GPU", None, NEW_COPIES)
    made = core.overlaps(0, Tokens("I", [3, 4, 5]), None, None, ["w"])["w"]
    assert (made, hash(made)) == (Overlap(1, (2, 0, 0, 0)), hash(Overlap(1, (2, 0, 0, 0))))
    assert type(made) is Overlap


@given(seed=st.integers(0, 2**32), slots=st.integers(1, 40))
def test_pool_without_blocks_makes_room_for_another(seed: int, slots: int) -> None:
    core, owner = core_with_owner()
    pools = [*product(["GPU", "CPU", "DISK"], range(60), range(1, 9))]
    some = random.Random(seed).sample(pools, 150)
    for number, (medium, group, size) in enumerate(some):
        tokens = Tokens("I", range(size))
        result = core.store(
            owner, [number], None, tokens, size, None, None, medium, group, NEW_COPIES
        )
        assert result == StoreResult.STORED
        core.expire(owner, slots)  # which may rest anywhere while pools come and go
        if number % 50 == 49:
            for removed in range(number - 49, number + 1):
                core.remove(owner, removed, *some[removed][:2])
            core.check()
            assert core.status(owner)["blocks"] == 0
