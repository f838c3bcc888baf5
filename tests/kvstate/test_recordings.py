"""The recordings, as read by this package and by an obviously correct replay."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from kvstate.events import (
    AllCleared,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Event,
    OtherGroupStored,
)
from kvstate.index.index import Index
from kvstate.overlap import Prompt
from kvstate.wire.zmq_wire import decode_batch, ends_replay, parse_frames
from tests.kvstate.recordings import (
    FEEDS,
    Replayed,
    Request,
    replays,
    requests,
    split_tokens,
    tokens_of,
)

CACHED = "vllm_0.32.0_cached_tokens"
SGLANG = "sglang_0.5.23_radix"


def decoded_view(event: Event) -> dict[str, object]:
    """An event as the recordings show it."""

    def view(block: int | bytes | None) -> object:
        return {"__hex__": block.hex()} if isinstance(block, bytes) else block

    match event:
        case AllCleared():
            return {"type": "AllBlocksCleared"}
        case BlocksRemoved():
            hashes = [view(block) for block in event.hashes]
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": event.medium}
        case BlocksStored():
            return {
                "type": "BlockStored",
                "block_hashes": [view(block) for block in event.hashes],
                "parent_block_hash": view(event.parent),
                "token_ids": list(event.tokens),
                "block_size": event.block_size,
                "lora": event.lora,
                "medium": event.medium,
                "extra_keys": [list(extra) for extra in event.extras or []],
            }
        case BlocksCopied() | OtherGroupStored():
            raise AssertionError("no recording has any")


def expected_view(event: dict[str, Any]) -> dict[str, object]:
    """The decoded view of the recording, less what events do not keep."""
    view = {name: event[name] for name in event if name in {"type", "block_size"}}
    if event["type"] == "AllBlocksCleared":
        return view
    view["block_hashes"] = [unsigned(block) for block in event["block_hashes"]]
    view["medium"] = event.get("medium") or "GPU"
    if event["type"] == "BlockStored":
        parent = event["parent_block_hash"]
        first, tokens = split_tokens(event["token_ids"])
        view["parent_block_hash"] = None if parent is None else unsigned(parent)
        view["token_ids"] = tokens
        view["lora"] = event.get("lora_name") or event.get("lora_id")
        view["extra_keys"] = expected_extras(event, first)
    return view


def unsigned(block: Any) -> Any:
    return block % 2**64 if isinstance(block, int) else block


def expected_extras(event: dict[str, Any], first: list[int]) -> list[list[object]]:
    """What each block carries besides tokens: the root block also a first token and a salt."""
    keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
    extras = [[key for key in block or [] if key != event.get("lora_name")] for block in keys]
    if event["parent_block_hash"] is None:
        salt = event.get("cache_salt")
        extras[0] = first + ([] if salt is None else [salt]) + extras[0]
    return extras if any(extras) else []


def frame_by_frame(name: str) -> Iterator[tuple[Index, Replayed, list[Request]]]:
    """The index and the simple replay of a recording, after every frame."""
    index, model = Index(12345678), Replayed()
    owner = index.add("w", 0, "tiny")
    owner.trusted = True
    recorded = requests(name)
    for frame in (frame for request in recorded for frame in request.frames):
        index.apply(owner, decode_batch(frame.frames[-1]).events)
        for event in frame.events:
            model.apply(event)
        yield index, model, recorded


def overlap(index: Index, tokens: list[int], lora: str | None, salt: str | None) -> int:
    found = index.overlaps(Prompt("tiny", tokens_of(tokens), lora, salt))
    return sum(found["w"].tiers) if found else 0


def held(index: Index, tokens: list[int], lora: str | None, salt: str | None) -> int:
    """The overlap, with blocks of which a copy was removed before that rule was known."""
    found = index.overlaps(Prompt("tiny", tokens_of(tokens), lora, salt)).get("w")
    return sum(found.tiers) + found.uncertain if found else 0


@pytest.mark.parametrize("name", FEEDS)
def test_decode_batch_reads_every_field_of_every_event(name: str) -> None:
    for frame in (frame for request in requests(name) for frame in request.frames):
        batch = decode_batch(frame.frames[2])
        assert (batch.timestamp, batch.faults) == (frame.decoded[0], ())
        assert batch.rank == (frame.decoded[2] if len(frame.decoded) > 2 else None)
        assert [decoded_view(event) for event in batch.events] == [
            expected_view(event) for event in frame.events
        ]


@pytest.mark.parametrize("name", FEEDS)
def test_sequence_numbers_are_consecutive(name: str) -> None:
    frames = [frame for request in requests(name) for frame in request.frames]
    numbers = [parse_frames(frame.frames).sequence for frame in frames]
    assert numbers == [frame.sequence for frame in frames]
    assert all(after == before + 1 for before, after in pairwise(numbers))


@pytest.mark.parametrize("name", FEEDS)
def test_overlap_of_recorded_prompts_equals_that_of_a_plain_replay(name: str) -> None:
    positive = 0
    for index, model, recorded in frame_by_frame(name):
        for request in recorded:
            if request.tokens is not None:
                space = (request.lora, request.salt)
                expected = model.overlap(request.tokens, *space)
                assert held(index, request.tokens, *space) == expected
                positive += expected > 0
        index.check()
    assert positive > 0


@pytest.mark.parametrize("name", FEEDS)
def test_overlap_of_every_stored_chain_equals_that_of_a_plain_replay(name: str) -> None:
    for index, model, _ in frame_by_frame(name):
        for block in model.parents:
            tokens = model.paths[block]
            lora, salt = model.spaces[model.chain(block)[0]]
            for end in (tokens, [*tokens, 1]):  # the last token is always computed
                assert held(index, end, lora, salt) == model.overlap(end, lora, salt)


def test_predicted_cached_tokens_equal_those_the_engine_reports() -> None:
    index = Index(12345678)
    owner = index.add("w", 0, "tiny")
    owner.trusted = True
    predicted = []
    for request in requests(CACHED):
        assert request.tokens is not None
        blocks = overlap(index, request.tokens, request.lora, request.salt)
        predicted.append((blocks * 32, request.cached_tokens))
        for frame in request.frames:
            index.apply(owner, decode_batch(frame.frames[2]).events)
    assert len(predicted) == 110
    assert [ours for ours, _ in predicted] == [theirs for _, theirs in predicted]


@pytest.mark.parametrize("name", [CACHED, SGLANG])
def test_salt_separates_chains(name: str) -> None:
    index = Index(12345678)
    owner = index.add("w", 0, "tiny")
    owner.trusted = True
    request = next(request for request in requests(name) if request.salt and request.frames)
    assert request.tokens is not None
    for frame in request.frames:
        index.apply(owner, decode_batch(frame.frames[2]).events)
    assert overlap(index, request.tokens, None, request.salt) > 0
    assert overlap(index, request.tokens, None, None) == 0
    assert overlap(index, request.tokens, None, "another") == 0


def test_bigrams_count_for_all_but_two_tokens() -> None:
    index = Index(12345678)
    owner = index.add("w", 0, "tiny")
    owner.trusted = True
    request = next(one for one in requests(SGLANG) if one.scenario == "eagle_bigram_page4")
    for frame in request.frames:
        index.apply(owner, decode_batch(frame.frames[2]).events)
    tokens = request.tokens
    assert tokens == list(range(10, 23))  # 13 of them: 12 bigrams, 3 pages of 4
    overlaps = [overlap(index, [*tokens, 23][:length], None, None) for length in (5, 6, 13, 14)]
    assert overlaps == [0, 1, 2, 3]
    assert overlap(index, [9, *tokens[1:], 23], None, None) == 0  # the first token counts too
    assert overlap(index, [*tokens, 23], None, "tenant") == 0


def test_pages_of_one_hash_in_two_namespaces_stay_until_both_are_removed() -> None:
    index = Index(12345678)
    owner = index.add("w", 0, "tiny")
    owner.trusted = True
    held_by = {}
    for request in requests(SGLANG):
        for frame in request.frames:
            index.apply(owner, decode_batch(frame.frames[2]).events)
        prompt = list(range(1000, 1064))
        held_by[request.scenario] = held(index, [*prompt, 1], None, None)
    assert held_by["e_extra_key_unregistered"] == 4  # stored a second time
    assert (held_by["c_evict_64"], held_by["c_evict_all"]) == (4, 0)
    assert owner.counts["removed_unknown"] == 0


@pytest.mark.parametrize(
    ("name", "scenario"),
    [("vllm_0.32.0_w1", "g2_replay_from_0_DEALER"), (SGLANG, "g_replay0_DEALER")],
)
def test_replayed_messages_of_four_frames_equal_the_live_ones(name: str, scenario: str) -> None:
    live = [frame for request in requests(name) for frame in request.frames]
    messages = [parse_frames(frames) for frames in replays(name)[scenario]]
    known = {frame.sequence: frame.frames[2] for frame in live}
    assert [*map(ends_replay, messages)] == [False] * (len(messages) - 1) + [True]
    assert [message.sequence for message in messages[:-1]] == list(range(len(messages) - 1))
    assert all(known[message.sequence] == message.body for message in messages[:-1])


def test_replayed_messages_without_a_topic_are_read_alike() -> None:
    for frames in replays("vllm_0.32.0_w1")["g3_replay_from_5_DEALER"]:
        assert parse_frames([frames[0], *frames[2:]]) == parse_frames(frames)


def test_replay_to_a_req_socket_holds_the_first_batch_only() -> None:
    (only,) = replays("vllm_0.32.0_w1")["g1_replay_from_0_REQ"]
    assert len(only) == 3
    assert parse_frames(only).sequence == 0


def test_replay_from_the_future_holds_only_its_end() -> None:
    (only,) = replays("vllm_0.32.0_w1")["g4_replay_future_DEALER"]
    assert ends_replay(parse_frames(only))
