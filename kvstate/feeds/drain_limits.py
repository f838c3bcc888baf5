"""How often the events of TensorRT-LLM are drained, and how much is taken."""

from dataclasses import dataclass, field

from kvstate.feeds.queue_limits import QueueLimits
from kvstate.feeds.transport import SLICE_SECONDS


@dataclass(frozen=True, slots=True)
class DrainLimits:
    """The limits of one worker's drain.

    poll_seconds: the waits between polls of a server: the shortest while events arrive, longer and
    longer while none do. retry_seconds: the first and the longest wait before another try.
    refused_seconds: the wait for an engine without events. connect_seconds: for a connection.
    answer_seconds: releases up to 1.2 answer only after two seconds without an event, and drained
    events are lost if the caller no longer waits. slice_seconds: the longest time of decoding
    without a pause.
    """

    poll_seconds: tuple[float, float] = (0.05, 0.5)
    retry_seconds: tuple[float, float] = (0.1, 5.0)
    refused_seconds: float = 60.0
    connect_seconds: float = 2.0
    answer_seconds: float = 30.0
    max_answer_bytes: int = 16 * 1024 * 1024
    slice_seconds: float = SLICE_SECONDS
    queue: QueueLimits = field(default_factory=QueueLimits)


USUAL = DrainLimits()
