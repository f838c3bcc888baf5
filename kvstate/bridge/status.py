"""Why a stream of the bridge ends or cannot begin.

    status              when                                         the subscriber
    OUT_OF_RANGE        it wants a number that cannot be had         begins again, from 0
    DATA_LOSS           a hole, or it fell behind the history        begins again, from 0
    UNAVAILABLE         the engine is not connected, or we stop      tries again at its number
    UNIMPLEMENTED       the engine publishes no events               does without

So do SMG's gateway (its kv_event_monitor) and our own subscriber.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvstate.feeds.feed_terms import State


class Status(StrEnum):
    """The gRPC status codes that a stream ends with, by name."""

    OUT_OF_RANGE = "OUT_OF_RANGE"
    DATA_LOSS = "DATA_LOSS"
    UNAVAILABLE = "UNAVAILABLE"
    UNIMPLEMENTED = "UNIMPLEMENTED"


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream ends; the reason is for people."""

    status: Status
    reason: str


class Standing:
    """Whether what the bridge knows of a rank is so now, by the states of the rank's feed.

    A replay after a gap changes nothing: what is known stays true of its number, and what follows
    comes. A replay after a lost connection has yet to show that the engine is the same one.
    """

    def __init__(self) -> None:
        self.fault: Ended | None = Ended(Status.UNAVAILABLE, "the engine is not connected yet")

    def note(self, state: State, reason: str) -> None:
        """The feed is in this state, for this reason."""
        match state:
            case State.LIVE | State.DEGRADED:
                self.fault = None
            case State.UNSUPPORTED:
                self.fault = Ended(Status.UNIMPLEMENTED, f"the engine has no events: {reason}")
            case State.REPLAYING if self.fault is None:
                pass
            case _:
                self.fault = Ended(Status.UNAVAILABLE, f"the engine's feed is {state}: {reason}")
