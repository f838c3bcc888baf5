import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import WireError
from kvstate.events import BlocksCopied, BlocksRemoved, BlocksStored, Event, EventBatch
from kvstate.wire.trtllm_wire import MAX_ELSEWHERE, RankDecoder, parse_drain, parse_event


def raw(number: int, data: Any, **fields: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"event_id": number, "data": data, **fields}))


def block(number: int, *token_ids: int, **fields: Any) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in token_ids]
    return {"type": "stored_block", "block_hash": number, "tokens": tokens, **fields}


def stored(*blocks: dict[str, Any], parent: int | None = None) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(hashes)}


def moved(number: int, old: int, new: int) -> dict[str, Any]:
    level = {"type": "event_diff", "old_value": old, "new_value": new}
    return {"type": "updated", "block_hash": number, "cache_level": level, "priority": None}


class Decoding:
    """One rank's events, numbered as they come."""

    def __init__(self, max_elsewhere: int = MAX_ELSEWHERE) -> None:
        self.decoder = RankDecoder(max_elsewhere)
        self.number = 0

    def batch(self, data: Any, window: int | None = None) -> EventBatch:
        event = parse_event(raw(self.number, data, window_size=window))
        self.number += 1
        return self.decoder.decode(event, 1.5)

    def events(self, data: Any, window: int | None = None) -> list[Event]:
        batch = self.batch(data, window)
        assert (batch.faults, batch.removal_lost) == ((), False)
        return batch.events

    def fault(self, data: Any, window: int | None = None) -> tuple[str, bool]:
        batch = self.batch(data, window)
        (name,) = batch.faults
        assert batch.events == []
        return name, batch.removal_lost


@pytest.fixture
def decoding() -> Decoding:
    return Decoding()


def held(events: list[Event]) -> list[int | bytes]:
    (event,) = events
    assert isinstance(event, BlocksStored)
    return event.hashes


def test_event_is_a_batch_with_the_stamp_of_its_drain(decoding: Decoding) -> None:
    event = parse_event(raw(0, removed(-1), attention_dp_rank=1, window_size=64))
    expected = EventBatch(2.5, [BlocksRemoved([2**64 - 1], group=64)], 1)
    assert decoding.decoder.decode(event, 2.5) == expected


def test_created_event_carries_no_blocks(decoding: Decoding) -> None:
    assert decoding.events({"type": "created", "num_blocks_per_cache_level": [10, 0]}) == []


def test_partial_blocks_are_left_out(decoding: Decoding) -> None:
    assert held(decoding.events(stored(block(1, 5, 6), block(2, 7)))) == [1]
    assert decoding.events(stored(block(3, 8))) == []
    assert decoding.events(stored()) == []


def test_blocks_without_tokens_are_left_out(decoding: Decoding) -> None:
    assert decoding.events(stored(block(1))) == []


def test_smaller_windows_are_not_indexed(decoding: Decoding) -> None:
    assert decoding.events({"type": "created"}, 64) == []
    assert decoding.events({"type": "created"}, 32) == []
    assert decoding.fault(stored(block(1, 5)), 32) == ("other_attention_group", False)
    assert decoding.fault(removed(1), 32) == ("other_attention_group", False)
    assert decoding.fault(moved(1, 0, 1), 32) == ("other_attention_group", False)
    assert held(decoding.events(stored(block(1, 5)), 64)) == [1]


def test_late_larger_window_counts_as_a_lost_removal(decoding: Decoding) -> None:
    assert held(decoding.events(stored(block(1, 5)), 32)) == [1]
    batch = decoding.batch(stored(block(2, 6)), 64)
    assert (batch.faults, batch.removal_lost) == (("larger_window",), True)
    assert held(batch.events) == [2]
    assert decoding.fault(stored(block(3, 7)), 32) == ("other_attention_group", False)
    assert decoding.events(removed(1), 32) == [BlocksRemoved([1], group=32)]


def test_restarted_server_is_learned_anew(decoding: Decoding) -> None:
    assert held(decoding.events(stored(block(1, 5, 6)), 64)) == [1]
    decoding.number = 0
    assert held(decoding.events(stored(block(1, 5)), 32)) == [1]


def test_moved_block_is_copied_and_removed_from_its_former_medium(decoding: Decoding) -> None:
    decoding.events(stored(block(1, 5), block(2, 6)))
    assert decoding.events(moved(1, 0, 1)) == [BlocksCopied([1], "CPU"), BlocksRemoved([1])]
    assert decoding.events(moved(1, 0, 1)) == []
    assert decoding.events(removed(1, 2)) == [BlocksRemoved([1], "CPU"), BlocksRemoved([2])]


def test_returning_block_is_copied_to_the_device(decoding: Decoding) -> None:
    assert held(decoding.events(stored(block(1, 5, cache_level=1)))) == [1]
    assert decoding.events(moved(1, 1, 0)) == [BlocksCopied([1]), BlocksRemoved([1], "CPU")]
    assert decoding.events(removed(1)) == [BlocksRemoved([1])]


def test_block_moved_to_an_unknown_level_is_removed(decoding: Decoding) -> None:
    assert decoding.events(moved(1, 0, 7)) == [BlocksRemoved([1])]


def test_change_of_priority_moves_nothing(decoding: Decoding) -> None:
    assert decoding.events({"type": "updated", "block_hash": 1, "cache_level": None}) == []


def test_blocks_off_the_device_beyond_the_limit_are_not_credited() -> None:
    decoding = Decoding(max_elsewhere=1)
    assert held(decoding.events(stored(block(1, 5, cache_level=1)))) == [1]
    assert decoding.events(stored(block(2, 5, cache_level=1))) == []
    assert decoding.events(moved(3, 0, 1)) == [BlocksRemoved([3])]


@pytest.mark.parametrize(
    ("data", "name", "removal_lost"),
    [
        ({"type": "stored"}, "malformed_event", False),
        (stored({"block_hash": "x"}), "malformed_event", False),
        (stored(block(1, 5, cache_level=9)), "unknown_medium", False),
        ({"type": "removed"}, "malformed_event", True),
        ({"type": "updated", "block_hash": None}, "malformed_event", True),
        ({"type": "resized"}, "unknown_event", False),
        ({}, "malformed_event", True),
        (7, "malformed_event", True),
    ],
)
def test_bad_event_is_named(
    decoding: Decoding, data: Any, name: str, *, removal_lost: bool
) -> None:
    assert decoding.fault(data) == (name, removal_lost)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "blocks", "block_hash", "tokens", "token_id", "cache_level"]),
            inner,
        )
    ),
    max_leaves=10,
)
events = st.fixed_dictionaries(
    {
        "event_id": st.integers(0, 9),
        "data": st.sampled_from(
            [stored(block(1, 5)), stored(block(1, 5, 6), block(2, 7)), removed(1), moved(1, 0, 1)]
        )
        | json_values,
    },
    optional={"window_size": json_values | st.integers(), "attention_dp_rank": json_values},
)


@given(st.lists(events | json_values).map(msgspec.json.encode) | st.binary())
def test_decode_returns_batches_or_refuses_any_bytes(body: bytes) -> None:
    decoder = RankDecoder()
    with contextlib.suppress(WireError):
        for one in parse_drain(body):
            with contextlib.suppress(WireError):
                assert isinstance(decoder.decode(parse_event(one), 1.5), EventBatch)


@pytest.mark.parametrize(
    ("data", "window", "fault"),
    [
        (stored(block(1, 7)), 2**70, "bad_group"),
        (stored(block(1, 7)), -1, "bad_group"),
        (stored(block(1, 7, lora_id=2**70)), None, "bad_lora"),
        (stored(block(1, 7, mm_keys=[{"hash": "h", "start_offset": 2**70}])), None, "bad_mm_keys"),
        (
            stored({**block(1), "tokens": [{"token_id": 7, "token_extra_id": 2**70}]}),
            None,
            "bad_tokens",
        ),
    ],
)
def test_integers_beyond_64_bits_are_left_out(data: Any, window: int | None, fault: str) -> None:
    decoding = Decoding()
    assert decoding.fault(data, window) == (fault, False)
    assert len(decoding.events(stored(block(2, 7)))) == 1


def test_removal_of_a_group_beyond_64_bits_is_a_lost_removal() -> None:
    assert Decoding().fault(removed(1), 2**70) == ("bad_group", True)
