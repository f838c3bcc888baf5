"""Decoding of `SubscribeKvEvents` streams: protobuf messages to batches, snapshots and load.

The messages are those of proto/kvsteer_kv_events.proto, in both generations: smg-grpc-proto 0.4.14
and 0.4.28, which adds snapshots, load, and what `kvstate.wire.grpc_events` reads of an event.
"""

import math
from collections.abc import Generator, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from kvstate.errors import WireError
from kvstate.events import Event, EventBatch
from kvstate.feeds.engine_load import EngineLoad
from kvstate.pb.kvsteer_kv_events_pb2 import KvCacheEvent, KvEventBatch
from kvstate.wire.admission import Skipped
from kvstate.wire.grpc_events import decode_event

# Servers pack at most 1,024 events; one store of a long prompt has thousands of blocks.
MAX_EVENTS = 65_536
MAX_BLOCKS = 262_144
MAX_SNAPSHOT_CHUNKS = 1_048_576


class SnapshotSpan(NamedTuple):
    """Numbers of a snapshot's first and last chunk, and the batches that its server never saw."""

    first: int
    last: int
    unknown_before: int


def parse_message(raw: bytes) -> KvEventBatch:
    """One message of the stream.

    Raises:
        WireError: it is no KvEventBatch, or one without a time stamp or with an absurd snapshot.
    """
    try:
        message = KvEventBatch.FromString(raw)
    except DecodeError:
        raise WireError("message is no KvEventBatch") from None
    if not math.isfinite(message.timestamp):
        raise WireError("batch has no timestamp")
    if message.snapshot.count > MAX_SNAPSHOT_CHUNKS:
        raise WireError(f"snapshot of {message.snapshot.count} chunks")
    return message


def rank_of(message: KvEventBatch) -> int:
    """The rank that a message is of; servers of one rank leave it out."""
    return message.dp_rank if message.HasField("dp_rank") else 0


def snapshot_of(message: KvEventBatch) -> SnapshotSpan | None:
    """The snapshot that this message begins, None if it begins none."""
    if not _begins_snapshot(message):
        return None
    first = message.sequence_number
    chunk = message.snapshot
    return SnapshotSpan(first, first + max(1, chunk.count) - 1, chunk.unknown_before)


def load_of(message: KvEventBatch) -> EngineLoad | None:
    """What the message says of the engine's load, None if nothing."""
    if not message.HasField("load"):
        return None
    load = message.load

    def said(name: str) -> int | None:
        return getattr(load, name) if load.HasField(name) else None

    return EngineLoad(
        running=load.running_requests,
        waiting=load.waiting_requests,
        waiting_uncached_tokens=said("waiting_uncached_tokens"),
        prefill_pending_tokens=said("prefill_pending_tokens"),
        cache_usage=_share(load.token_usage),
        active_cache_usage=(
            _share(load.active_token_usage) if load.HasField("active_token_usage") else None
        ),
        tokens_per_second=_positive(load.gen_throughput),
        max_running=load.max_running_requests or None,
        age_ms=load.age_ms,
        silence_ms=said("engine_silence_ms"),
    )


def batch_of(message: KvEventBatch, full_block_size: int = 0) -> EventBatch:
    """The events of a message, decoded in one go; see `decoding`."""
    steps = decoding(message, full_block_size)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            batch: EventBatch = end.value
            return batch


def decoding(message: KvEventBatch, full_block_size: int = 0) -> Generator[None, None, EventBatch]:
    """Decodes a message event by event; a bad one is skipped and named, the rest kept.

    The cleared event that begins a snapshot is left out: the snapshot itself replaces everything.
    full_block_size: blocks of fewer tokens are partial ones, which TensorRT-LLM publishes too.
    """
    rank = rank_of(message)
    lost = _lost_as_a_whole(message)
    if lost:
        return EventBatch(message.timestamp, [], rank, (lost,), removal_lost=True)
    events: list[Event] = []
    faults: list[str] = []
    for raw in _events(message):
        try:
            events += decode_event(raw, full_block_size)
        except Skipped as skipped:
            faults.append(str(skipped))
        yield
    return EventBatch(message.timestamp, events, rank, tuple(faults))


def _lost_as_a_whole(message: KvEventBatch) -> str:
    """Why nothing that the message said can be known, "" if it can.

    SMG's relays pass on a payload that they cannot decode as an empty batch without a time stamp.
    """
    if len(message.events) > MAX_EVENTS:
        return "oversized_batch"
    if sum(len(event.stored.blocks) for event in message.events) > MAX_BLOCKS:
        return "oversized_batch"
    says_nothing = not message.events and not message.HasField("snapshot")
    return "undecodable_batch" if says_nothing and not message.timestamp else ""


def _begins_snapshot(message: KvEventBatch) -> bool:
    return message.HasField("snapshot") and message.snapshot.index == 0


def _events(message: KvEventBatch) -> Sequence[KvCacheEvent]:
    events = message.events
    if _begins_snapshot(message) and events and events[0].HasField("cleared"):
        return events[1:]
    return events


def _share(figure: float) -> float:
    return min(max(figure, 0.0), 1.0) if math.isfinite(figure) else 0.0


def _positive(figure: float) -> float:
    return max(figure, 0.0) if math.isfinite(figure) else 0.0
