"""How long a subscription over gRPC waits, and how much it takes."""

from dataclasses import dataclass, field

from kvstate.feeds.queue_limits import QueueLimits
from kvstate.feeds.transport import SLICE_SECONDS, UNREACHED_SECONDS


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """The limits of one worker's stream.

    keepalive_ms, long_keepalive_ms, keepalive_timeout_ms: pings detect a server that died silently.
    The engines' servers allow one every 10 s on an idle stream and disconnect clients that ping
    more often; servers with gRPC's defaults allow one every 5 minutes.

    heartbeat_seconds: silence that shows that a server which sends heartbeats died; those are load
    records, at least one every 5 s. subscribe_seconds: the most time for the answer to a
    subscription; SMG's gateways wait equally long. retry_seconds: the first and the longest wait
    before another try. refused_seconds: the wait for an engine without events, which can begin to
    publish only by a restart. unreached_seconds: how long a server may be unreachable before it is
    reported. slice_seconds: the longest time of decoding without a pause.
    """

    keepalive_ms: int = 12_000
    long_keepalive_ms: int = 330_000
    keepalive_timeout_ms: int = 3_000
    max_message_bytes: int = 4 * 1024 * 1024
    heartbeat_seconds: float = 7.0
    subscribe_seconds: float = 2.0
    retry_seconds: tuple[float, float] = (0.1, 5.0)
    refused_seconds: float = 60.0
    unreached_seconds: float = UNREACHED_SECONDS
    slice_seconds: float = SLICE_SECONDS
    queue: QueueLimits = field(default_factory=QueueLimits)


USUAL = GrpcLimits()
