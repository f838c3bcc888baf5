"""How long a subscription over ZMQ waits, and how much it takes."""

from dataclasses import dataclass

from kvstate.wire.zmtp import MAX_COMMANDS


@dataclass(frozen=True, slots=True)
class ZmqLimits:
    """The limits of one transport and its connections."""

    # The most time for a handshake.
    handshake_seconds: float = 10.0
    # Between two heartbeats.
    heartbeat_seconds: float = 2.0
    # The most bytes queued while the loop is busy, besides an incomplete message. Further messages
    # wait in the publisher, which drops those beyond its own limit (hwm).
    queue_bytes: int = 1024 * 1024
    # A peer that sends more commands in two seconds is flooding.
    max_commands: int = 256
    # The most commands that are read before the loop has a turn.
    commands_at_once: int = MAX_COMMANDS
    # The first and the longest wait before another try to connect, or to bind.
    reconnect_seconds: tuple[float, float] = (0.05, 2.0)
    bind_retry_seconds: tuple[float, float] = (0.5, 10.0)
    # How long a publisher may be unreachable before it is reported.
    unreached_seconds: float = 3.0
    # The most time until the answer to a replay begins.
    replay_seconds: float = 5.0
    # Silence, after a new batch, that shows that the end of an answer was dropped. It grows with
    # each answer that ends like this, to spare a publisher that is merely slow.
    silence_seconds: float = 0.1
    # Messages of an answer that fit in its queue however slowly they are sent: half of libzmq's
    # 1,000, in case a publisher sets a lower limit.
    never_dropped: int = 500
    # The most bytes of batches read but not applied yet; beyond it the publisher waits, then drops.
    max_read_bytes: int = 40 * 1024 * 1024


USUAL = ZmqLimits()
