"""How long a subscription over gRPC waits, and how much it takes."""

from dataclasses import dataclass, field

from kvstate.feeds.queue_limits import QueueLimits
from kvstate.feeds.transport import SLICE_SECONDS, UNREACHED_SECONDS


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """The limits of one worker's stream."""

    # Between two pings, which detect a server that died silently. The engines' servers allow one
    # every 10 s on an idle stream and disconnect clients that ping more often.
    keepalive_ms: int = 12_000
    # The same for servers with gRPC's defaults, which allow one every 5 minutes.
    long_keepalive_ms: int = 330_000
    # The most time for the answer to a ping.
    keepalive_timeout_ms: int = 3_000
    # Larger messages end the stream.
    max_message_bytes: int = 4 * 1024 * 1024
    # Silence that shows that a server which sends heartbeats died: load records, at least one every
    # 5 s.
    heartbeat_seconds: float = 7.0
    # The most time for the answer to a subscription; SMG's gateways wait equally long.
    subscribe_seconds: float = 2.0
    # The first and the longest wait before another try.
    retry_seconds: tuple[float, float] = (0.1, 5.0)
    # The wait for an engine without events, which can begin to publish only by a restart.
    refused_seconds: float = 60.0
    # How long a server may be unreachable before it is reported.
    unreached_seconds: float = UNREACHED_SECONDS
    # The longest time of decoding without a pause.
    slice_seconds: float = SLICE_SECONDS
    # Of messages that wait to be read.
    queue: QueueLimits = field(default_factory=QueueLimits)


USUAL = GrpcLimits()
