"""One data-parallel rank: an engine with a cache of its own, and what tells of that cache."""

import os
from collections.abc import Sequence

from simulator.answers import Writer
from simulator.cache import PrefixCache, Shape
from simulator.dialects import Dialect
from simulator.drain import DrainedEvent, EventDrain
from simulator.endpoints import rank_endpoint
from simulator.engine import Engine
from simulator.events import Event
from simulator.hashing import Hashing
from simulator.interference import Interference
from simulator.latency import Latency
from simulator.publisher import Publisher, PublisherOptions
from simulator.settings import Settings
from simulator.sglang_hashing import SglangHashing
from simulator.vllm_hashing import ROOT, VllmHashing

_ROOT_BYTES = 32


class Rank:
    """Runs in the event loop that it was constructed in (OSError if an endpoint is taken).

    Must be closed.
    """

    def __init__(
        self, number: int, settings: Settings, writer: Writer, *, end_of_turn: int
    ) -> None:
        self.number = number
        self.interference = Interference()
        self._settings = settings
        self.publisher = self._open_publisher()
        self._drain = self._new_drain()
        self.engine = Engine(
            self._new_cache(),
            Latency(settings.prefill_tokens_per_second, settings.decode_tokens_per_second),
            writer,
            end_of_turn=end_of_turn,
            max_running=settings.max_running_requests,
            publish=self._publish,
            publishes_idle=settings.speaks.habits.publishes_idle,
        )

    def drain(self) -> list[DrainedEvent]:
        """The events that nobody fetched yet; none for engines without such a list."""
        return self._drain.take() if self._drain else []

    def restart(self) -> None:
        """Die and come back: nothing cached, numbers from 0, the same endpoints."""
        if self.publisher is not None:
            self.publisher.restart()
        self._drain = self._new_drain()
        self.engine.restart(self._new_cache())

    def close(self) -> None:
        """Close the publisher's sockets."""
        if self.publisher is not None:
            self.publisher.close()

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
            dialect=settings.speaks,
            topic=settings.topic,
            buffer_batches=settings.buffer_batches,
            rank=self.number,
            replay_limit_messages=settings.replay_limit_messages,
            connects=settings.connect,
        )
        return Publisher(options, self.interference)

    def _new_drain(self) -> EventDrain | None:
        settings = self._settings
        if settings.speaks.engine != "trtllm":
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
                hashing=_hashing(settings.speaks, bigrams=settings.bigrams),
                habits=settings.speaks.habits,
                host_blocks=settings.host_blocks,
                placeholders=settings.placeholders,
            )
        )


def _hashing(dialect: Dialect, *, bigrams: bool) -> Hashing:
    if dialect.engine == "sglang":
        return SglangHashing(bigrams=bigrams)
    return VllmHashing(os.urandom(_ROOT_BYTES) if dialect.random_root else ROOT)
