"""One data-parallel rank: an engine with its own cache, its publisher and its list of events.

The list is TensorRT-LLM's: POST /kv_cache_events returns and empties it. Its JSON is that of
`KVCacheEventSerializer` in `tensorrt_llm/_utils.py`; event ids count from 0, `created` being the
first, whether or not anyone takes the events. A real engine that publishes over ZMQ leaves this
list empty; a simulated one fills both.
"""

import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from kvtools.simulator.cache import PrefixCache, Shape
from kvtools.simulator.dialects import EventDialect
from kvtools.simulator.engine import Latency, SimulatedEngine
from kvtools.simulator.events import (
    DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    WireHash,
)
from kvtools.simulator.hashing import ROOT, Hashing, SglangHashing, VllmHashing
from kvtools.simulator.interference import Interference
from kvtools.simulator.publisher import LoadPublisher, LoadStat, Publisher, PublisherOptions
from kvtools.simulator.responses import AnswerWriter
from kvtools.simulator.settings import Settings, rank_endpoint

_PRIORITY = 35  # TensorRT-LLM's default
_DEVICE_LEVEL, _HOST_LEVEL = 0, 1
_ROOT_BYTES = 32
DrainedEvent = dict[str, Any]


class EventDrain:
    """The latest `max_events` events that were not fetched yet; older ones are lost."""

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
        """Adds the events of one step."""
        for event in events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    self._removed(event)
                case AllBlocksCleared():
                    raise AssertionError("TensorRT-LLM has no such event")

    def take(self) -> list[DrainedEvent]:
        """Returns the waiting events, oldest first, and removes them."""
        events = list(self._waiting)
        self._waiting.clear()
        return events

    def _stored(self, event: BlockStored) -> None:
        """Encodes new blocks as runs, and known blocks on another level as moves."""
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
        """Moves a block, and announces it if its nearest level changes."""
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


class Rank:
    """One rank, bound to the event loop in which it was constructed; must be closed.

    Raises:
        OSError: an endpoint is taken.
    """

    def __init__(
        self, number: int, settings: Settings, writer: AnswerWriter, *, end_of_turn: int
    ) -> None:
        self.number = number
        self.interference = Interference()
        self._settings = settings
        self.publisher = self._open_publisher()
        self._drain = self._new_drain()
        self.engine = SimulatedEngine(
            self._new_cache(),
            Latency(settings.prefill_tokens_per_second, settings.decode_tokens_per_second),
            writer,
            end_of_turn=end_of_turn,
            max_running=settings.max_running_requests,
            publish=self._publish,
            publishes_idle=settings.event_dialect.habits.publishes_idle,
        )
        self.load = self._open_load()

    def drain(self) -> list[DrainedEvent]:
        """Returns the events not fetched yet; none for engines without such a list."""
        return self._drain.take() if self._drain else []

    def restart(self) -> None:
        """Restarts: empty cache, numbers from 0, the same endpoints."""
        if self.publisher is not None:
            self.publisher.restart()
        if self.load is not None:
            self.load.restart()
        self._drain = self._new_drain()
        self.engine.restart(self._new_cache())

    def close(self) -> None:
        """Closes the publishers' sockets."""
        if self.publisher is not None:
            self.publisher.close()
        if self.load is not None:
            self.load.close()

    def _publish(self, events: Sequence[Event]) -> None:
        if not self._settings.prefix_caching:
            return
        if self.publisher is not None:
            self.publisher.publish(events)
        if self._drain is not None:
            self._drain.record(events)

    def _open_publisher(self) -> Publisher | None:
        settings = self._settings
        if settings.events_endpoint is None:
            return None
        replay = settings.replay_endpoint
        options = PublisherOptions(
            endpoint=rank_endpoint(settings.events_endpoint, self.number),
            replay_endpoint=replay and rank_endpoint(replay, self.number),
            dialect=settings.event_dialect,
            topic=settings.topic,
            buffer_batches=settings.buffer_batches,
            rank=self.number,
            replay_limit_messages=settings.replay_limit_messages,
            connects=settings.connect,
        )
        return Publisher(options, self.interference)

    def _open_load(self) -> LoadPublisher | None:
        settings = self._settings
        if settings.load_endpoint is None:
            return None
        return LoadPublisher(rank_endpoint(settings.load_endpoint, self.number), self._load_stat)

    def _load_stat(self) -> LoadStat:
        counters, settings = self.engine.counters, self._settings
        capacity = settings.blocks * settings.block_size_tokens
        used = round(self.engine.cache_usage * capacity)
        waiting = counters.in_flight - counters.running
        return ("LoadStat", counters.running, waiting, used, capacity, self.number)

    def _new_drain(self) -> EventDrain | None:
        settings = self._settings
        if settings.event_dialect.engine != "trtllm":
            return None
        levels = (settings.blocks, settings.host_blocks)
        return EventDrain(
            blocks_per_level=levels if settings.host_blocks else levels[:1],
            window_tokens=settings.max_model_len_tokens,
            max_events=settings.drain_events,
            rank=self.number if settings.ranks > 1 else None,
        )

    def _new_cache(self) -> PrefixCache:
        settings = self._settings
        return PrefixCache(
            Shape(
                blocks=settings.blocks,
                block_size=settings.block_size_tokens,
                hashing=_hashing(settings.event_dialect, bigrams=settings.bigrams),
                habits=settings.event_dialect.habits,
                host_blocks=settings.host_blocks,
                placeholders=settings.placeholders,
            )
        )


def _hashing(dialect: EventDialect, *, bigrams: bool) -> Hashing:
    if dialect.engine == "sglang":
        return SglangHashing(bigrams=bigrams)
    return VllmHashing(os.urandom(_ROOT_BYTES) if dialect.random_root else ROOT)
