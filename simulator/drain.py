"""TensorRT-LLM's own event list: POST /kv_cache_events gives it and empties it.

Pure. The JSON is that of `KVCacheEventSerializer` in `tensorrt_llm/_utils.py`. Event ids count
from 0, `created` being the first, whether or not anyone takes the events. A real engine that
publishes over ZMQ leaves this list empty; a simulated one fills both.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from simulator.events import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, Event, WireHash

DrainedEvent = dict[str, Any]

_PRIORITY = 35  # TensorRT-LLM's default
_DEVICE_LEVEL, _HOST_LEVEL = 0, 1


class EventDrain:
    """The latest `max_events` events that nobody took yet; older ones are lost."""

    def __init__(
        self,
        *,
        blocks_per_level: tuple[int, ...],
        window_tokens: int,
        max_events: int,
        rank: int | None,
    ) -> None:
        self._window_tokens = window_tokens
        self._rank = rank
        self._next_id = 0
        self._waiting: deque[DrainedEvent] = deque(maxlen=max_events)
        self._levels: dict[WireHash, set[int]] = {}
        created = {"type": "created", "num_blocks_per_cache_level": list(blocks_per_level)}
        self._append(created)

    def record(self, events: Iterable[Event]) -> None:
        """One step happened."""
        for event in events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    self._removed(event)
                case AllBlocksCleared():
                    raise AssertionError("TensorRT-LLM has no such event")

    def take(self) -> list[DrainedEvent]:
        """The waiting events, oldest first; each is handed out once."""
        events = list(self._waiting)
        self._waiting.clear()
        return events

    def _stored(self, event: BlockStored) -> None:
        """Blocks that are new make runs; those known on another level move."""
        level, size = _level(event.medium), event.block_size
        parent = before = event.parent_block_hash
        run: list[dict[str, Any]] = []
        for number, block_hash in enumerate(event.block_hashes):
            if block_hash in self._levels:
                self._flush(parent, run)
                run = []
                self._move(block_hash, self._levels[block_hash] | {level})
            else:
                parent = parent if run else before
                tokens = event.token_ids[number * size : (number + 1) * size]
                run.append(_block(block_hash, tokens, level))
                self._levels[block_hash] = {level}
            before = block_hash
        self._flush(parent, run)

    def _flush(self, parent: WireHash | None, run: list[dict[str, Any]]) -> None:
        if run:
            self._append({"type": "stored", "parent_hash": parent, "blocks": run})

    def _removed(self, event: BlockRemoved) -> None:
        level = _level(event.medium)
        gone = [key for key in event.block_hashes if self._levels[key] == {level}]
        for block_hash in event.block_hashes:
            if block_hash in gone:
                del self._levels[block_hash]
            else:
                self._move(block_hash, self._levels[block_hash] - {level})
        if gone:
            self._append({"type": "removed", "block_hashes": gone})

    def _move(self, block_hash: WireHash, levels: set[int]) -> None:
        """A block counts where it is nearest."""
        old, new = min(self._levels[block_hash]), min(levels)
        self._levels[block_hash] = levels
        if old != new:
            change = {"type": "event_diff", "new_value": new, "old_value": old}
            self._append(
                {
                    "type": "updated",
                    "block_hash": block_hash,
                    "cache_level": change,
                    "priority": None,
                }
            )

    def _append(self, data: dict[str, Any]) -> None:
        event: DrainedEvent = {
            "event_id": self._next_id,
            "data": data,
            "window_size": self._window_tokens,
        }
        if self._rank is not None:
            event["attention_dp_rank"] = self._rank
        self._waiting.append(event)
        self._next_id += 1


def _level(medium: str | None) -> int:
    return _DEVICE_LEVEL if medium == DEVICE else _HOST_LEVEL


def _block(block_hash: WireHash, tokens: Iterable[object], level: int) -> dict[str, Any]:
    return {
        "type": "stored_block",
        "block_hash": block_hash,
        "tokens": [
            {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens
        ],
        "cache_level": level,
        "priority": _PRIORITY,
    }
