"""The cache against the recordings of a real vLLM 0.32.0, event by event, and on its own."""

from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.simulator.cache import Holding, PrefixCache, Shape
from kvtools.simulator.dialects import DEFAULT, DIALECTS
from kvtools.simulator.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, WireHash
from kvtools.simulator.hashing import NO_NAMESPACE, CacheNamespace, VllmHashing, chain_of
from kvtools.simulator.tokens import ModelTokens

Recorded = Callable[[str], list[dict[str, Any]]]
Batches = list[list[Event]]

BLOCK_SIZE = 32
# With this option vLLM reports reused blocks again, in one event before all others.
REPORTS_REUSED_BLOCKS = "s2_kv_cache_report_mode_full"
# Its two prompts reached the engine one step after the other.
ARRIVED_APART = "s5_stream_false_echo_batch_prompts"


def recorded_batches(record: dict[str, Any]) -> Batches:
    decoded = [msgspec.msgpack.decode(payload)[1] for payload in record["payloads"]]
    batches = [[msgspec.convert(event, Event) for event in events] for events in decoded]
    if record["scenario"] == REPORTS_REUSED_BLOCKS:
        del batches[0][0]
    return batches


def prompts_of(record: dict[str, Any], tokens: ModelTokens) -> list[list[int]]:
    body = record["body"]
    if record["prompt_token_ids"] is None:
        return [tokens.of_text(prompt) for prompt in body["prompt"]]
    return [record["prompt_token_ids"]] * body.get("n", 1)


def tokens_of(event: BlockStored) -> list[int]:
    return [token for token in event.token_ids if isinstance(token, int)]


def outputs(prompts: list[list[int]], length: int, batches: Batches) -> list[list[int]]:
    """The generated tokens as the events show them; those in blocks never filled are zero."""
    first = len(prompts[0])
    blocks = (first + length - 1) // BLOCK_SIZE - first // BLOCK_SIZE
    stored = [event for events in batches for event in events if isinstance(event, BlockStored)]
    decoded = stored[len(stored) - blocks * len(prompts) :]
    result = []
    for number, prompt in enumerate(prompts):
        mine = [token for event in decoded[number :: len(prompts)] for token in tokens_of(event)]
        shown = mine[len(prompt) % BLOCK_SIZE :]
        result.append(shown + [0] * (length - len(shown)))
    return result


def drive(cache: PrefixCache, record: dict[str, Any], tokens: ModelTokens) -> tuple[int, Batches]:
    """Runs a recorded request as vLLM's scheduler did; returns cached tokens, events by step."""
    prompts, wanted = prompts_of(record, tokens), recorded_batches(record)
    length = record["response"]["usage"]["completion_tokens"] // len(prompts)
    answers = outputs(prompts, length, wanted)
    namespace = CacheNamespace(salt=record["body"].get("cache_salt"))
    session = (record["headers"] or {}).get("X-Session-ID")
    apart = record["scenario"] == ARRIVED_APART
    holdings: dict[int, Holding] = {}
    batches: Batches = []
    for step in range(length + apart * (len(prompts) - 1)):
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            position = step - number * apart
            if position == 0:
                holding = cache.begin(prompt, namespace, session_id=session)
                assert holding is not None
                holdings[number] = holding
            elif 0 < position < length:
                assert cache.extend(holdings[number], answer[position - 1])
        batches.append(cache.take_events())
        for number in range(len(prompts)):
            if step - number * apart == length - 1:
                cache.release(holdings[number])
    return holdings[0].cached_tokens, [events for events in batches if events]


def as_bytes(batches: Batches) -> list[bytes]:
    layout = DIALECTS[DEFAULT].layout
    return [msgspec.msgpack.encode(layout.encode(events)) for events in batches]


@pytest.mark.parametrize(
    ("name", "blocks", "requests"), [("w1", 40, 31), ("cached_tokens", 48, 110)]
)
def test_cache_gives_the_recorded_events_step_by_step(
    recorded: Recorded, tokens: ModelTokens, name: str, blocks: int, requests: int
) -> None:
    cache = PrefixCache(Shape(blocks=blocks, block_size=BLOCK_SIZE))
    # Left out: a chat that was refused, and resets, which show in the next request's events.
    served = [r for r in recorded(name) if r["status"] == 200 and "prompt_token_ids" in r]
    assert len(served) == requests
    for record in served:
        wanted = recorded_batches(record)
        if wanted and wanted[0][0] == AllBlocksCleared():
            assert cache.reset()
        _, batches = drive(cache, record, tokens)
        assert as_bytes(batches) == as_bytes(wanted), record["scenario"]


def test_cache_hits_have_the_recorded_length(recorded: Recorded, tokens: ModelTokens) -> None:
    cache = PrefixCache(Shape(blocks=48, block_size=BLOCK_SIZE))
    for record in recorded("cached_tokens"):
        if any(AllBlocksCleared() in events for events in recorded_batches(record)):
            assert cache.reset()
        cached, _ = drive(cache, record, tokens)
        reported = record["response"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == reported, record["scenario"]


def begin(cache: PrefixCache, length: int, *, first: int = 0, reuse: bool = True) -> Holding:
    holding = cache.begin(range(first, first + length), NO_NAMESPACE, reuse=reuse)
    assert holding is not None
    return holding


def test_prompt_shorter_than_a_block_is_not_announced() -> None:
    cache = PrefixCache(Shape(blocks=8, block_size=4))
    cache.release(begin(cache, 3))
    assert cache.take_events() == []


def test_last_prompt_token_is_always_computed_with_its_block() -> None:
    cache = PrefixCache(Shape(blocks=8, block_size=4))
    cache.release(begin(cache, 8))
    assert begin(cache, 8).cached_tokens == 4
    assert begin(cache, 9).cached_tokens == 8


def test_begin_without_room_changes_nothing() -> None:
    cache = PrefixCache(Shape(blocks=4, block_size=4))
    running = begin(cache, 8)
    cache.take_events()
    assert cache.begin(range(100, 108), NO_NAMESPACE) is None
    assert cache.take_events() == []
    assert cache.usage == pytest.approx(2 / 3)
    cache.release(running)
    assert cache.usage == 0


def test_begin_needs_room_for_hits_on_unused_blocks() -> None:
    cache = PrefixCache(Shape(blocks=5, block_size=4))
    cache.release(begin(cache, 8))
    begin(cache, 8, first=100)
    assert cache.begin(range(9), NO_NAMESPACE) is None


def test_extend_fails_without_a_free_block() -> None:
    cache = PrefixCache(Shape(blocks=2, block_size=2))
    holding = begin(cache, 1)
    assert cache.extend(holding, 7)
    assert not cache.extend(holding, 8)
    assert holding.tokens == [0, 7]


def test_copies_of_a_block_are_removed_by_an_event_each() -> None:
    cache = PrefixCache(Shape(blocks=3, block_size=4))
    for _ in range(2):
        cache.release(begin(cache, 4, reuse=False))
    stored = [e for e in cache.take_events() if isinstance(e, BlockStored)]
    begin(cache, 8, first=100)
    removed = [e for e in cache.take_events() if isinstance(e, BlockRemoved)]
    assert [e.block_hashes for e in removed] == [e.block_hashes for e in stored]


Operation = tuple[int, int, int]


@given(operations=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 14), st.integers(0, 3))))
def test_announced_copies_predict_every_hit(
    operations: list[Operation],
) -> None:
    """The rule that routers rely on, for any order of prompts, answers and evictions."""
    cache = PrefixCache(Shape(blocks=7, block_size=2))
    copies: Counter[WireHash] = Counter()
    for salt, length, generated in operations:
        namespace = CacheNamespace(salt=str(salt))
        hashing = VllmHashing()
        hashes = list(map(hashing.wire, chain_of(range(length), 2, namespace, hashing)))
        expected = len(list(takewhile(lambda key: copies[key] > 0, hashes[: (length - 1) // 2])))
        holding = cache.begin(range(length), namespace)
        if holding is None:
            assert length > 6 * 2
            continue
        assert holding.cached_tokens == expected * 2
        for token in range(generated):
            cache.extend(holding, token)
        cache.release(holding)
        for event in cache.take_events():
            assert not isinstance(event, AllBlocksCleared)
            change = 1 if isinstance(event, BlockStored) else -1
            for key in event.block_hashes:
                copies[key] += change
                assert copies[key] >= 0
        assert cache.usage == 0


def test_reset_is_refused_while_a_request_runs() -> None:
    cache = PrefixCache(Shape(blocks=8, block_size=4))
    holding = begin(cache, 4)
    assert not cache.reset()
    cache.release(holding)
    assert cache.reset()
    assert begin(cache, 5).cached_tokens == 0
