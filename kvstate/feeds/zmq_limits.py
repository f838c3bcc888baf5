"""How long a subscription over ZMQ waits, and how much it takes."""

from dataclasses import dataclass

from kvstate.wire.zmtp import MAX_COMMANDS


@dataclass(frozen=True, slots=True)
class ZmqLimits:
    """The limits of one transport and its connections.

    handshake_seconds: the most time for a handshake. heartbeat_seconds: between heartbeats.
    queue_bytes: the most bytes queued while the loop is busy, besides an incomplete message;
    further messages wait in the publisher, which drops those beyond its own limit (hwm).
    max_commands: a peer that sends more in two seconds is flooding. commands_at_once: the most that
    are read before the loop has a turn.

    reconnect_seconds, bind_retry_seconds: the first and the longest wait before another try.
    unreached_seconds: how long a publisher may be unreachable before it is reported.

    replay_seconds: the most time until an answer begins. silence_seconds: silence, after a new
    batch, that shows that the end of an answer was dropped; it grows with each answer that ends
    like this, to spare a publisher that is merely slow. never_dropped: messages of an answer that
    fit in its queue however slowly they are sent: half of libzmq's 1,000, in case a publisher sets
    a lower limit. max_read_bytes: the most batches read but not applied yet; beyond it the
    publisher waits, then drops.
    """

    handshake_seconds: float = 10.0
    heartbeat_seconds: float = 2.0
    queue_bytes: int = 1024 * 1024
    max_commands: int = 256
    commands_at_once: int = MAX_COMMANDS
    reconnect_seconds: tuple[float, float] = (0.05, 2.0)
    bind_retry_seconds: tuple[float, float] = (0.5, 10.0)
    unreached_seconds: float = 3.0
    replay_seconds: float = 5.0
    silence_seconds: float = 0.1
    never_dropped: int = 500
    max_read_bytes: int = 40 * 1024 * 1024


USUAL = ZmqLimits()
