"""A recorded engine's cache, dealt out over workers by whoever sends them its requests. Pure.

A block is held by each worker that computed a prompt with it, as long as the recorded engine held
it. So whichever workers a router chooses, the one that computed a prefix last holds all that the
recorded engine reused of it, and reports the same number of cached tokens.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from judge_recordings import Batch, Event, Recorded

# vLLM 0.33 with a draft model: the tokens after a block that its hash contains too.
_LOOKAHEAD = "lookahead_token_ids"

# What an event says of each of its blocks, in lists in the blocks' order.
_OF_EACH_BLOCK = ("extra_keys", "mm_keys", _LOOKAHEAD)

_Key = tuple[str | None, tuple[int, ...]]
Payloads = list[tuple[int, bytes]]
"""Which worker publishes what, in order."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A block that the recorded engine holds.

    path: all tokens from the prompt's first one to its last. key: what its hash is made of.
    """

    hash: int
    path: tuple[int, ...]
    key: _Key
    stored: Event


class World:
    """The caches of some workers."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._paths: dict[int, tuple[int, ...]] = {}
        self._blocks: dict[int, _Block] = {}
        self._by_path: dict[_Key, _Block] = {}
        self._lookahead = 0
        self._copies: Counter[int] = Counter()
        self._held: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def holders(self, request: Recorded) -> set[int]:
        """Returns the workers that hold all that the recorded engine reused, if it reused any."""
        needed = [one for one in self._known(request) if len(one.path) <= request.cached]
        return {
            worker
            for worker in range(self._workers)
            if needed and all(self._held[one.hash][worker] for one in needed)
        }

    def reported(self, request: Recorded, worker: int) -> int:
        """Returns the cached tokens that this worker reports, never more than were recorded."""
        found = 0
        for block in self._known(request):
            if len(block.path) > request.cached or not self._held[block.hash][worker]:
                break
            found = len(block.path)
        return found

    def served(self, request: Recorded, worker: int, now: float) -> Payloads:
        """Has a worker compute a request; now: seconds since the epoch.

        Returns what is published: as it was recorded, and before it those blocks of the prompt that
        the recorded engine held, but not this worker.
        """
        missing = [one for one in self._known(request) if not self._held[one.hash][worker]]
        for one in missing:
            self._held[one.hash][worker] += 1
        stored = [one.stored for one in missing]
        told: Payloads = [(worker, msgspec.msgpack.encode([now, stored, 0]))] if stored else []
        for batch in request.batches:
            told += self._dealt(batch, request, worker)
        return told

    def _known(self, request: Recorded) -> Iterator[_Block]:
        """The blocks of a prompt that the recorded engine holds, as far as none is missing."""
        tokens, size = tuple(request.tokens), request.block_size
        for end in range(size, len(tokens) - self._lookahead + 1, size):
            block = self._by_path.get((request.salt, tokens[: end + self._lookahead]))
            if block is None:
                return
            yield block

    def _dealt(self, batch: Batch, request: Recorded, server: int) -> Payloads:
        """Gives each event of a message to the workers that it concerns."""
        events: list[list[Event]] = [[] for _ in range(self._workers)]
        for event in batch.events:
            if event["type"] == "BlockStored":
                self._store(event, request, server)
                events[server].append(event)
            elif event["type"] == "BlockRemoved":
                for worker, hashes in self._remove(event["block_hashes"], server).items():
                    is_whole = hashes == list(event["block_hashes"])
                    events[worker].append(event if is_whole else event | {"block_hashes": hashes})
            else:
                self._clear()
                for own in events:
                    own.append(event)
        return [(worker, batch.only(own)) for worker, own in enumerate(events) if own]

    def _store(self, event: Event, request: Recorded, worker: int) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        path = () if parent is None else self._path_of(parent, event, request)
        for place, hash_ in enumerate(event["block_hashes"]):
            stored = _single(event, place, parent, size)
            path = (*path, *stored["token_ids"])
            after = tuple(*stored.get(_LOOKAHEAD, ()))
            self._lookahead = len(after)
            block = _Block(hash_, path, (request.salt, (*path, *after)), stored)
            self._paths[hash_] = path
            self._blocks[hash_] = self._by_path[block.key] = block
            self._copies[hash_] += 1
            self._held[hash_][worker] += 1
            parent = hash_

    def _path_of(self, block: int, event: Event, request: Recorded) -> tuple[int, ...]:
        """The tokens to the end of a block; of one that is not known, by what follows it."""
        if block in self._paths:
            return self._paths[block]
        size, tokens = request.block_size, tuple(request.tokens)
        after = tuple(event["token_ids"][:size])
        ends = range(size, len(tokens), size)
        return next(tokens[:end] for end in ends if tokens[end:][:size] == after)

    def _remove(self, hashes: Sequence[int], server: int) -> dict[int, list[int]]:
        """Removes one copy of each; of the last one, all workers are told.

        Blocks that the engine held before it was recorded nobody holds here.
        """
        told: defaultdict[int, list[int]] = defaultdict(list)
        for hash_ in hashes:
            if hash_ not in self._blocks:
                told[server].append(hash_)
                continue
            held = self._held[hash_]
            self._copies[hash_] -= 1
            if self._copies[hash_] > 0:
                twice = next((worker for worker, copies in held.items() if copies > 1), None)
                if twice is not None:
                    held[twice] -= 1
                    told[twice].append(hash_)
                continue
            for worker, copies in held.items():
                told[worker] += [hash_] * copies
            held.clear()
            block = self._blocks.pop(hash_)
            self._by_path.pop(block.key)
        return told

    def _clear(self) -> None:
        self._blocks.clear()
        self._by_path.clear()
        self._copies.clear()
        self._held.clear()


def _single(event: Event, place: int, parent: int | None, size: int) -> Event:
    """Returns the event that stores one of an event's blocks alone."""
    only = {name: [event[name][place]] for name in _OF_EACH_BLOCK if event.get(name)}
    return (
        event
        | only
        | {
            "block_hashes": [event["block_hashes"][place]],
            "parent_block_hash": parent,
            "token_ids": event["token_ids"][place * size :][:size],
        }
    )
