from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.events import AllCleared, BlocksCopied, BlocksRemoved, BlocksStored, OtherGroupStored
from kvstate.overlap import Tokens, tokens_of
from kvstate.wire.extras import Skipped, holds_prefix
from kvstate.wire.zmq_wire import decode_event, tag_of

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
}
ARRAY = ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2, None]
PAIRS = [[4, 5], [5, 6], [6, 7], [7, 8]]


def stored(**fields: Any) -> BlocksStored:
    event = decode_event(STORED | fields)
    assert isinstance(event, BlocksStored)
    return event


def from_array(*more: Any) -> BlocksStored:
    event = decode_event([*ARRAY, *more])
    assert isinstance(event, BlocksStored)
    return event


def fault(event: object) -> str:
    with pytest.raises(Skipped) as skipped:
        decode_event(event)
    return str(skipped.value)


def test_long_ids_are_read_with_their_last_bits() -> None:
    long = [2**61 + 5, 6, 7, 2**61 + 8]
    assert stored(token_ids=long).tokens == tokens_of(long)
    pairs = [[4, long[0]], [long[0], 6], [6, 7], [7, long[3]]]
    assert stored(token_ids=pairs).tokens == tokens_of(long)


def test_store_is_read_from_a_map() -> None:
    expected = BlocksStored([1, 2], None, Tokens("I", [5, 6, 7, 8]), 2, names_salts=True)
    assert stored() == expected


def test_store_is_read_from_an_array_of_any_length() -> None:
    expected = BlocksStored([1, 2], None, Tokens("I", [5, 6, 7, 8]), 2)
    assert from_array() == msgspec.structs.replace(expected, names_salts=False, names_loras=False)
    whole = from_array("GPU", "a", [["a"], ["a"]], 1, "full_attention", None, "later")
    assert (whole.lora, whole.group, whole.kind) == ("a", 1, "full_attention")
    assert (whole.names_salts, whole.names_loras) == (True, True)


def test_hashes_are_unsigned_numbers_or_bytes() -> None:
    event = stored(block_hashes=[-1, b"h" * 32], parent_block_hash=-2)
    assert event.hashes == [2**64 - 1, b"h" * 32]
    assert event.parent == 2**64 - 2


def test_adapter_is_known_by_name_else_by_number() -> None:
    assert stored(lora_name="a", lora_id=3).lora == "a"
    assert stored(lora_id=3).lora == 3
    assert stored(lora_name="a", lora_id="x").lora == "a"


def test_extra_keys_are_kept_without_the_adapter_name() -> None:
    assert stored(lora_name="a", extra_keys=[["a", "salt"], ["a"]]).extras == [("salt",), ()]


def test_store_names_its_medium_and_group() -> None:
    event = stored(medium="cpu", group_idx=3)
    assert (event.medium, event.group) == ("CPU", 3)


def test_salt_belongs_to_the_root_block() -> None:
    expected = [("tenant",), ()]
    assert stored(cache_salt="tenant").extras == expected
    assert stored(extra_keys=[["tenant"], None]).extras == expected
    assert from_array("GPU", {"cache_salt": "tenant"}).extras == expected
    assert stored(cache_salt="tenant", parent_block_hash=7).extras is None  # its parent has it


@pytest.mark.parametrize("tokens", [{}, {"token_ids": PAIRS}])
@pytest.mark.parametrize("adapter", [{}, {"lora_name": "a"}])
def test_salt_in_the_extra_keys_of_the_root_gives_the_same_store(
    tokens: dict[str, Any], adapter: dict[str, Any]
) -> None:
    usual = stored(cache_salt="tenant", **tokens, **adapter)
    names = [*adapter.values()]  # as vLLM writes them, which SGLang may do as well
    keys = [[*names, "tenant"], names or None]
    assert stored(extra_keys=keys, **tokens, **adapter) == usual
    assert stored(extra_keys=keys, cache_salt="tenant", **tokens, **adapter) == usual


def test_map_at_the_end_of_an_array_names_no_adapter() -> None:
    event = from_array("GPU", {"cache_salt": "tenant", "lora_name": "a"})
    assert (event.lora, event.names_salts, event.names_loras) == (None, True, False)
    assert from_array("GPU", {}).extras is None


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention"])
def test_groups_that_hold_the_whole_prefix_are_stored(kind: str) -> None:
    assert stored(kv_cache_spec_kind=kind, group_idx=1).kind == kind


@given(
    st.sampled_from(["full_attention", "sliding_window", "chunked_local_attention", "mamba"])
    | st.text(max_size=20)
    | st.none()
    | st.integers(),
    st.none() | st.integers(0, 9),
)
def test_stored_blocks_are_of_a_group_that_holds_the_whole_prefix(kind: object, group: int) -> None:
    event = decode_event(STORED | {"kv_cache_spec_kind": kind, "group_idx": group})
    if isinstance(event, BlocksStored):
        assert event.kind is None or holds_prefix(event.kind)
    else:
        assert isinstance(event, OtherGroupStored)


def test_store_of_another_group_says_what_a_prefix_needs_of_it() -> None:
    masked = STORED | {"block_hashes": [2], "kv_cache_spec_kind": "sliding_window", "group_idx": 1}
    event = OtherGroupStored(1, [2], 2, 7, is_root=True, is_sparse=True)
    assert decode_event(masked | {"kv_cache_spec_sliding_window": 8}) == event
    assert decode_event(masked) == msgspec.structs.replace(event, reach=0)
    state = STORED | {"kv_cache_spec_kind": "mamba", "parent_block_hash": 5, "medium": "cpu"}
    whole = OtherGroupStored(None, [1, 2], 2, 1, "CPU")
    assert decode_event(state) == whole
    other = STORED | {"kv_cache_spec_kind": ["mla_attention"]}
    assert decode_event(other) == OtherGroupStored(None, [1, 2], 2, is_root=True)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"kv_cache_spec_sliding_window": 1 << 24}, "bad_window"),
        ({"kv_cache_spec_sliding_window": "8"}, "bad_window"),
        ({"block_size": None}, "bad_block_size"),
        ({"block_hashes": [1.5]}, "bad_hash"),
    ],
)
def test_unreadable_stores_of_another_group_are_skipped(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(Skipped, match=fault):
        decode_event(STORED | {"kv_cache_spec_kind": "sliding_window"} | fields)


@pytest.mark.parametrize("fields", [{"token_ids": []}, {"block_size": 0}])
def test_blocks_known_by_hash_are_copied(fields: dict[str, Any]) -> None:
    event = decode_event(STORED | fields | {"medium": "STORAGE", "group_idx": 0})
    assert event == BlocksCopied([1, 2], "STORAGE", 0)


def test_bigrams_are_stored_as_second_tokens_with_the_first_in_the_extras() -> None:
    event = stored(token_ids=PAIRS)
    assert event.bigrams
    assert list(event.tokens) == [5, 6, 7, 8]
    assert event.extras == [(4,), ()]
    assert stored(token_ids=PAIRS, cache_salt="tenant").extras == [(4, "tenant"), ()]
    assert stored(token_ids=PAIRS, parent_block_hash=7).extras is None


def test_images_become_extras_of_their_blocks() -> None:
    images = [[], [{"type": "mm_key", "hash": "abc", "start_offset": 3}]]
    assert stored(mm_keys=images).extras == [(), (["abc", -3],)]


def test_removal_is_read_from_both_layouts() -> None:
    event = BlocksRemoved([1], "CPU", 2)
    as_map = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "group_idx": 2}
    assert decode_event(["BlockRemoved", [1], "CPU", 2]) == decode_event(as_map) == event
    assert decode_event(as_map | {"kv_cache_spec_kind": "mamba"}) == event


def test_clearing_is_read_from_both_layouts() -> None:
    assert decode_event(["AllBlocksCleared"]) == AllCleared()
    assert decode_event({"type": "AllBlocksCleared", "ownership": None}) == AllCleared()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"locality": "REMOTE", "kv_cache_spec_kind": "mamba"}, "other_locality"),
        ({"ownership": "KVCR", "block_hashes": None}, "foreign_ownership"),
        ({"kv_cache_spec_kind": "mamba", "group_idx": "x"}, "bad_group"),
        ({"block_size": 2.0}, "bad_block_size"),
        ({"block_size": 65_537}, "bad_block_size"),
        ({"block_size": -2}, "bad_block_size"),
        ({"token_ids": [5, 6, 7]}, "misaligned_tokens"),
        ({"token_ids": [5, 6, 7, "8"]}, "bad_tokens"),
        ({"token_ids": [5, 6, 7, 2**63]}, "bad_tokens"),
        ({"token_ids": [5, 6, 7, [7, 8]]}, "bad_tokens"),
        ({"token_ids": "text"}, "bad_tokens"),
        ({"token_ids": [*PAIRS[:3], [9, 9]]}, "broken_bigrams"),
        ({"token_ids": [*PAIRS[:3], [7, 8, 9]]}, "bad_tokens"),
        ({"token_ids": [*PAIRS[:3], 8]}, "bad_tokens"),
        ({"token_ids": [*PAIRS[:3], [7, -1]]}, "bad_tokens"),
        ({"block_hashes": None}, "bad_hash"),
        ({"block_hashes": ["h", 2]}, "bad_hash"),
        ({"parent_block_hash": 1.5}, "bad_hash"),
        ({"parent_block_hash": True}, "bad_hash"),
        ({"extra_keys": [None]}, "bad_extra_keys"),
        ({"mm_keys": [None]}, "bad_mm_keys"),
        ({"cache_salt": 7}, "bad_cache_salt"),
        ({"lora_name": ["a"]}, "bad_lora"),
        ({"lora_name": {"cache_salt": "tenant"}}, "bad_lora"),  # only arrays have that
        ({"lora_id": "3"}, "bad_lora"),
        ({"lora_id": True}, "bad_lora"),
        ({"medium": "TAPE"}, "unknown_medium"),
        ({"medium": "TAPE", "token_ids": []}, "unknown_medium"),
        ({"medium": 7}, "bad_medium"),
        ({"group_idx": -1}, "bad_group"),
    ],
)
def test_store_that_cannot_be_credited_is_skipped_by_name(
    fields: dict[str, Any], name: str
) -> None:
    assert fault(STORED | fields) == name


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (["BlockRemoved", "h"], "bad_hash"),
        (["BlockRemoved", [1], 7], "bad_medium"),
        (["BlockRemoved", [1], None, "x"], "bad_group"),
        ({"type": "BlockRemoved", "block_hashes": [1], "locality": "REMOTE"}, "other_locality"),
        ({"type": "BlockRemoved", "block_hashes": [1], "ownership": "kvcr"}, "foreign_ownership"),
        ({"type": "AllBlocksCleared", "ownership": "kvcr"}, "foreign_ownership"),
        (["BlockPinned", [1]], "unknown_event"),
        ([], "malformed_event"),
        ([7], "malformed_event"),
        (7, "malformed_event"),
        ({"type": None}, "malformed_event"),
    ],
)
def test_other_events_that_cannot_be_applied_are_skipped_by_name(event: object, name: str) -> None:
    assert fault(event) == name


def test_tag_of_returns_the_type_of_an_event() -> None:
    assert [tag_of(event) for event in (["a"], [], {"type": "b"}, {}, 7)] == [
        "a",
        None,
        "b",
        None,
        None,
    ]
