"""How much waits for the subscriber of a rank on a connection that several ranks share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of each rank's queue.

    max_bytes, max_signals: the most that is queued; a subscriber applies about 10 MB a second.
    signals_at_once: how many it receives at once, as many as from the ZMQ transport.
    stall_seconds: a subscriber that reads nothing for this long is assumed to be dead.
    retry_seconds: the wait after an unexpected error of the connection.
    """

    max_bytes: int = 8 * 1024 * 1024
    max_signals: int = 1024
    signals_at_once: int = 64
    stall_seconds: float = 10.0
    retry_seconds: float = 5.0


USUAL_QUEUE = QueueLimits()
