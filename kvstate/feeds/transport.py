"""The interface between subscriber and transport."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstate.errors import printable
from kvstate.events import Batch, EngineLoad
from kvstate.feeds.feed_sources import Recovery

# Events are decoded and applied in slices of about this length: a pick waits for one of them, not
# for a whole feed.
SLICE_SECONDS = 0.0009

# A publisher that was never reached is reported after this time: it may start together with the
# router.
UNREACHED_SECONDS = 3.0


class RankName(NamedTuple):
    """The worker and rank of a feed, for messages."""

    worker: str
    rank: int


@dataclass(frozen=True, slots=True)
class Connected:
    """The subscription is in place; events published from now on arrive."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is lost, or could not be made yet; the transport keeps trying.

    reason: may quote the peer; it is made printable.
    """

    reason: str = "connection lost"

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


@dataclass(frozen=True, slots=True)
class Refused:
    """The publisher reports that it has no events; the transport tries again, at long intervals.

    reason: may quote the peer; it is made printable.
    """

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


@dataclass(frozen=True, slots=True)
class SnapshotBegun:
    """Batches `first` to `last`, which follow, are a snapshot of everything that the rank holds.

    unknown_before: batches that the sender of the snapshot missed; 0 if none.
    """

    first: int
    last: int
    unknown_before: int = 0


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message arrived whose number cannot be read, or (is_load) that is no load report."""

    is_load: bool = False


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The engine reported its load."""

    load: EngineLoad


Signal = Connected | Disconnected | Refused | Batch | SnapshotBegun | Malformed | LoadReport


class FeedTransport(Protocol):
    """A connection to one publisher that reconnects by itself.

    Signals are in order: no batch of a new connection comes before its Connected, and none of an
    old connection after its Disconnected.
    """

    @property
    def recovery(self) -> Recovery:
        """How missed batches can be recovered."""

    @property
    def why_lost(self) -> str:
        """Why batches that are not recovered are lost, in words.

        If `recovery` is `Recovery.NONE`, they name what is not there: "no replay endpoint".
        """

    async def receive(self) -> list[Signal]:
        """Waits for signals and returns at least one; a cancellation loses none."""

    def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        """Yields the publisher's batches from number `start` on, as many as it still has.

        To be called only if `recovery` is `Recovery.REPLAY`.

        Raises:
            ReplayError: no answer in time, or an incomplete one.
        """

    async def close(self) -> None:
        """Gives up the connection."""
