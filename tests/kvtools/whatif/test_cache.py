"""The cache of a simulated engine, beside one that counts the uses of each block."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvtools.whatif.engines import Cache, Request


class PlainCache:
    """Blocks by how many requests use them, and the others in the order in which uses ended."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used: Counter[int] = Counter()
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._reserved = 0
        self.changes: list[tuple[list[int], list[int]]] = []

    def overlap(self, blocks: Sequence[int]) -> int:
        found = 0
        while found < len(blocks) - 1 and self._has(blocks[found]):
            found += 1
        return found

    def _has(self, block: int) -> bool:
        return self._used[block] > 0 or block in self._unused

    def take(self, request: Request, overlap: int) -> bool:
        shared = request.blocks[:overlap]
        needed = len(request.blocks) - overlap + len(request.answer_blocks)
        kept = sum(block in self._unused for block in shared)
        used = sum(1 for uses in self._used.values() if uses)
        if needed > self._capacity - used - self._reserved - kept and (used or self._reserved):
            return False
        for block in shared:
            self._unused.pop(block, None)
            self._used[block] += 1
        self._reserved += needed
        used = sum(1 for uses in self._used.values() if uses)
        removed = []
        while self._unused and used + len(self._unused) + self._reserved > self._capacity:
            removed.append(self._unused.popitem(last=False)[0])
        if removed:
            self.changes.append(([], removed))
        return True

    def fill(self, blocks: Sequence[int]) -> None:
        stored = [block for block in blocks if not self._has(block)]
        for block in blocks:
            self._unused.pop(block, None)
            self._used[block] += 1
        self._reserved -= len(blocks)
        if stored:
            self.changes.append((stored, []))

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._used[block] -= 1
            if not self._used[block]:
                self._unused[block] = None


# Prompts as paths in a tree of blocks: equal paths are equal blocks.
paths = st.lists(st.integers(0, 2), min_size=1, max_size=7)
steps = st.lists(st.one_of(paths, st.integers(0, 5)), max_size=60)


def numbered(path: Sequence[int], numbers: dict[tuple[int, ...], int]) -> list[int]:
    ends = range(1, len(path) + 1)
    return [numbers.setdefault(tuple(path[:end]), len(numbers)) for end in ends]


@given(steps, st.integers(8, 20))
def test_cache_holds_and_evicts_what_one_does_that_counts(
    steps: list[list[int] | int], capacity: int
) -> None:
    changes: list[tuple[list[int], list[int]]] = []

    def changed(stored: Sequence[int], removed: Sequence[int]) -> None:
        changes.append((list(stored), list(removed)))

    cache, plain = Cache(capacity, changed), PlainCache(capacity)
    numbers: dict[tuple[int, ...], int] = {}
    computing: list[tuple[Request, int]] = []
    answering: list[Request] = []
    for step in steps:
        if isinstance(step, list):
            blocks = numbered(step, numbers)
            answer = [numbers.setdefault((*step, 9), len(numbers))]
            request = Request(0.0, blocks, len(blocks) * 128, 10, answer)
            overlap = cache.overlap(blocks)
            assert overlap == plain.overlap(blocks)
            has_room = cache.take(request, overlap)
            assert has_room == plain.take(request, overlap)
            if has_room:
                computing.append((request, overlap))
        elif computing and step % 2:
            request, overlap = computing.pop(step % len(computing))
            answering.append(request)
            cache.fill(request)
            plain.fill(request.blocks[overlap:])
        elif answering:
            request = answering.pop(step % len(answering))
            cache.finish(request)
            plain.fill(request.answer_blocks)
            plain.release([*request.blocks, *request.answer_blocks])
        assert changes == plain.changes


def test_blocks_that_another_request_uses_are_not_evicted() -> None:
    removed: list[int] = []
    cache = Cache(7, lambda _, gone: removed.extend(gone))
    requests = [
        Request(0.0, [1, 2], 256, 1, [3]),
        Request(0.0, [1, 5], 256, 1, [6]),
        Request(0.0, [7], 128, 1),
    ]
    for one in requests:
        assert cache.take(one, cache.overlap(one.blocks))
        cache.fill(one)
    cache.finish(requests[0])
    assert cache.take(Request(0.0, [8, 9, 10], 384, 1), 0)
    assert removed == [3, 2]
