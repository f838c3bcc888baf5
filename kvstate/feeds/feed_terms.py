"""What a feed is told, and what it asks for: the words of `kvstate.feeds.feed`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Body = TypeVar("Body")


class Recovery(StrEnum):
    """How a feed's transport can have what was missed.

    none: not at all.
    replay: asked for apart from the live stream (ZMQ publishers with a replay endpoint).
    resume: a connection begins with it, as far as the publisher still has it (gRPC).
    queued: what was not read yet waits at the publisher (an HTTP drain).
    """

    NONE = "none"
    REPLAY = "replay"
    RESUME = "resume"
    QUEUED = "queued"


class State(StrEnum):
    """What a feed's credits are worth; the table is in `kvstate.feeds.feed`."""

    CONNECTING = "connecting"
    REPLAYING = "replaying"
    LIVE = "live"
    DEGRADED = "degraded"
    STALE = "stale"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Numbered(Generic[Body]):
    """A batch as the feed sees it: its number, its stamp, and a body that is none of its business.

    body is None where the payload could not be decoded, and fault says why; its size counts while
    it is held back.
    """

    sequence: int
    stamp: float
    body: Body | None
    size_bytes: int = 0
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Apply(Generic[Body]):
    """Apply this body to the index."""

    body: Body


@dataclass(frozen=True, slots=True)
class Forget:
    """Everything stored so far is gone: the publisher restarted."""


@dataclass(frozen=True, slots=True)
class Demote:
    """Everything stored so far is uncertain: there is a hole."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask the publisher for its batches from this number on; it replaces a replay under way."""

    start: int


Effect = Apply[Body] | Forget | Demote | Replay
