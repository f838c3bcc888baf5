"""How often the events of TensorRT-LLM are drained, and how much is taken."""

from dataclasses import dataclass, field

from kvstate.feeds.queue_limits import QueueLimits
from kvstate.feeds.transport import SLICE_SECONDS


@dataclass(frozen=True, slots=True)
class DrainLimits:
    """The limits of one worker's drain."""

    # The waits between polls of a server: the shortest while events arrive, longer and longer while
    # none do.
    poll_seconds: tuple[float, float] = (0.05, 0.5)
    # The first and the longest wait before another try.
    retry_seconds: tuple[float, float] = (0.1, 5.0)
    # The wait for an engine without events.
    refused_seconds: float = 60.0
    # The most time for a connection.
    connect_seconds: float = 2.0
    # The most time for an answer: releases up to 1.2 answer only after two seconds without an
    # event, and drained events are lost if the caller no longer waits.
    answer_seconds: float = 30.0
    max_answer_bytes: int = 16 * 1024 * 1024
    # The longest time of decoding without a pause.
    slice_seconds: float = SLICE_SECONDS
    # Of messages that wait to be read.
    queue: QueueLimits = field(default_factory=QueueLimits)


USUAL = DrainLimits()
