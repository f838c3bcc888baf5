"""Blocks off the device: kept when evicted, announced, found again; in every engine's way."""

from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.simulator.cache import PrefixCache, Shape
from kvtools.simulator.dialects import DIALECTS, Habits
from kvtools.simulator.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, WireHash
from kvtools.simulator.hashing import NO_NAMESPACE, Adapter, CacheNamespace, VllmHashing, chain_of
from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings
from tests.kvtools.simulator.readers import Client, complete, published

HASHING = VllmHashing()


def new_cache(
    *,
    blocks: int = 3,
    host_blocks: int = 4,
    placeholders: bool = False,
    habits: Habits | None = None,
) -> PrefixCache:
    return PrefixCache(
        Shape(
            blocks=blocks,
            block_size=4,
            host_blocks=host_blocks,
            placeholders=placeholders,
            habits=habits or Habits(),
        )
    )


def run(
    cache: PrefixCache, first: int, length: int, namespace: CacheNamespace = NO_NAMESPACE
) -> int:
    holding = cache.begin(range(first, first + length), namespace)
    assert holding is not None
    cache.release(holding)
    return holding.cached_tokens


def summary(events: list[Event]) -> list[tuple[str, str | None, int]]:
    shown = [event for event in events if not isinstance(event, AllBlocksCleared)]
    return [(type(one).__name__, one.medium, len(one.block_hashes)) for one in shown]


def test_evicted_block_is_announced_on_the_host_and_restored_by_a_hit() -> None:
    cache = new_cache()
    run(cache, 0, 8)
    run(cache, 100, 8)
    assert cache.blocks_held == (2, 2)
    assert summary(cache.take_events()) == [
        ("BlockStored", "GPU", 2),
        ("BlockStored", "CPU", 1),
        ("BlockRemoved", "GPU", 1),
        ("BlockStored", "CPU", 1),
        ("BlockRemoved", "GPU", 1),
        ("BlockStored", "GPU", 2),
    ]
    assert cache.held_tokens(range(8), NO_NAMESPACE) == 4
    assert run(cache, 0, 8) == 4
    assert summary(cache.take_events())[-1] == ("BlockStored", "GPU", 2)


def test_host_block_is_described_as_on_the_device() -> None:
    cache = new_cache()
    namespace = CacheNamespace(Adapter("a", 1), "s")
    run(cache, 0, 8, namespace)
    run(cache, 100, 8)
    stored = [event for event in cache.take_events() if isinstance(event, BlockStored)]
    last, first = (event for event in stored if event.medium == "CPU")
    assert (first.parent_block_hash, first.token_ids) == (None, (0, 1, 2, 3))
    assert (last.parent_block_hash, last.token_ids) == (first.block_hashes[0], (4, 5, 6, 7))
    assert (first.extra_keys, last.extra_keys) == ((("a", "s"),), (("a",),))
    assert (first.lora_name, first.block_size) == ("a", 4)


def test_placeholders_hold_their_hash_alone() -> None:
    cache = new_cache(placeholders=True)
    run(cache, 0, 4)
    run(cache, 100, 8)
    stored = [event for event in cache.take_events() if isinstance(event, BlockStored)]
    assert stored[1] == BlockStored(stored[0].block_hashes, None, (), 0, None, "CPU", None)


def test_full_host_evicts_the_least_recently_used() -> None:
    cache = new_cache(blocks=2, host_blocks=2)
    for first in (0, 100, 200):
        run(cache, first, 4)
    assert cache.blocks_held == (1, 2)
    assert cache.begin([0, 1, 2, 3, 4], NO_NAMESPACE) is None  # two blocks: there is one
    cache.take_events()
    run(cache, 300, 4)
    [lost, *_] = [event for event in cache.take_events() if isinstance(event, BlockRemoved)]
    [digest] = chain_of(range(4), 4, NO_NAMESPACE, HASHING)
    assert (lost.medium, lost.block_hashes) == ("CPU", (HASHING.wire(digest),))


def test_last_device_copy_is_the_one_kept_on_the_host() -> None:
    cache = new_cache(blocks=3)
    for _ in range(2):
        holding = cache.begin(range(4), NO_NAMESPACE, reuse=False)
        assert holding is not None
        cache.release(holding)
    cache.take_events()
    run(cache, 100, 8)
    media = [(name, medium) for name, medium, _ in summary(cache.take_events())]
    assert media == [
        ("BlockRemoved", "GPU"),
        ("BlockStored", "CPU"),
        ("BlockRemoved", "GPU"),
        ("BlockStored", "GPU"),
    ]


@pytest.mark.parametrize("clears", [True, False])
def test_reset_empties_the_host_too(*, clears: bool) -> None:
    cache = new_cache(habits=Habits(announces_clear=clears))
    run(cache, 0, 8)
    run(cache, 100, 8)
    cache.take_events()
    assert cache.reset()
    assert cache.blocks_held == (0, 0)
    events = cache.take_events()
    if clears:
        assert events == [AllBlocksCleared()]
    else:
        assert summary(events) == [("BlockRemoved", "GPU", 2), ("BlockRemoved", "CPU", 2)]
    assert run(cache, 0, 8) == 0


@given(
    operations=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 14), st.integers(0, 3))),
    host_blocks=st.integers(0, 5),
    habits=st.sampled_from(list({one.habits for one in DIALECTS.values()})),
)
def test_announced_copies_on_each_medium_predict_every_hit(
    operations: list[tuple[int, int, int]], host_blocks: int, habits: Habits
) -> None:
    """The rule that routers rely on, for any order of prompts, answers and evictions."""
    cache = PrefixCache(Shape(blocks=7, block_size=2, host_blocks=host_blocks, habits=habits))
    copies: Counter[tuple[str | None, WireHash]] = Counter()
    for salt, length, generated in operations:
        namespace = CacheNamespace(salt=str(salt))
        hashes = list(map(HASHING.wire, chain_of(range(length), 2, namespace, HASHING)))
        usable = hashes[: (length - 1) // 2]
        announced = {key for (_, key), number in copies.items() if number}
        held = takewhile(announced.__contains__, usable)
        expected = len(list(held)) * 2
        assert cache.held_tokens(range(length), namespace) == expected
        holding = cache.begin(range(length), namespace)
        if holding is None:
            assert length > 6 * 2
            continue
        assert holding.cached_tokens == expected
        for token in range(generated):
            cache.extend(holding, token)
        cache.release(holding)
        for event in cache.take_events():
            if not isinstance(event, AllBlocksCleared):
                change = 1 if isinstance(event, BlockStored) else -1
                copies.update({(event.medium, key): change for key in event.block_hashes})
                assert all(copies[event.medium, key] >= 0 for key in event.block_hashes)
        assert sum(copies.values()) == sum(cache.blocks_held)
        assert cache.usage == 0


@pytest.mark.parametrize(
    ("dialect", "media"),
    [
        ("vllm-0.9", {None}),
        ("vllm-0.10", {"GPU", "CPU"}),
        ("vllm-0.32", {"GPU", "CPU"}),
        ("sglang-0.5.22", {"GPU", "CPU_PINNED"}),
        ("trtllm", {"GPU"}),
    ],
)
async def test_layouts_announce_host_blocks_as_far_as_they_can(
    dialect: str, media: set[str | None]
) -> None:
    settings = Settings(dialect=dialect, blocks=3, host_blocks=4)
    async with running(settings) as worker, Client(worker.url) as own:
        for first in (0, 100, 0):
            cached = await complete(own, range(first, first + 17))
        assert cached == 16
        events = await published(worker)
    known = DIALECTS[dialect].layout
    if known.positional:
        stored = [event for event in events if event[0] == "BlockStored"]
        assert {event[6] if len(event) > 6 else None for event in stored} == media
    else:
        stored = [event for event in events if event["type"] == "BlockStored"]
        assert {event["medium"] for event in stored} == media
