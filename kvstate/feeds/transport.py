"""What a subscriber needs of a transport, and the transport that lives in memory."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvstate.errors import ReplayError, printable
from kvstate.events import Batch, Body, EngineLoad
from kvstate.feeds.feed_sources import Recovery

# Events are decoded and applied in slices of this length, so that a pick never waits behind a feed.
SLICE_SECONDS = 0.001

# A publisher that was never reached is told after so long: it may start together with the router.
UNREACHED_SECONDS = 3.0


class Place(NamedTuple):
    """Whose feed it is, for messages."""

    worker: str
    rank: int


@dataclass(frozen=True, slots=True)
class Connected:
    """The subscription is in place; what is published from now on arrives."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is lost, or cannot be made at first; the transport goes on trying.

    reason: may hold words of the peer, which are made printable.
    """

    reason: str = "connection lost"

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


@dataclass(frozen=True, slots=True)
class Refused:
    """The publisher says that it has no events to give; the transport asks again, seldom.

    reason: may hold words of the peer, which are made printable.
    """

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The batches numbered `first` to `last`, which follow, hold everything that the rank has.

    unknown_before: batches that the sender of the snapshot never saw; 0 if it saw all.
    """

    first: int
    last: int
    unknown_before: int = 0


@dataclass(frozen=True, slots=True)
class Malformed:
    """Something came whose number could not even be read."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The engine said how much it has to do."""

    load: EngineLoad


Signal = Connected | Disconnected | Refused | Batch | Snapshot | Malformed | LoadReport


class Transport(Protocol):
    """A connection to one publisher that mends itself.

    Signals come in the order in which things happened: never a batch of a new connection before
    its Connected, nor one of an old connection after its Disconnected.
    """

    @property
    def recovery(self) -> Recovery:
        """How what was missed can be had."""

    async def receive(self) -> list[Signal]:
        """The signals that wait, at least one; waits for it. A cancellation loses none."""

    def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        """The publisher's batches from number `start` on, as many as it still has.

        Only where the recovery is a replay.

        Raises:
            ReplayError: no answer in time, or an incomplete one.
        """

    async def close(self) -> None:
        """Gives up the connection."""


@dataclass
class MemoryTransport:
    """A publisher in this process, for tests and trials: put signals in, they come out.

    history: what a replay answers with, by number; None if there is no replay endpoint.
    """

    history: dict[int, Body] | None = field(default_factory=dict)
    replays: list[int] = field(default_factory=list)
    replay_error: str | None = None
    recovery: Recovery = Recovery.REPLAY
    _signals: asyncio.Queue[Signal] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        if self.history is None and self.recovery is Recovery.REPLAY:
            self.recovery = Recovery.NONE

    def put(self, signal: Signal) -> None:
        """Makes a signal happen."""
        self._signals.put_nowait(signal)

    async def receive(self) -> list[Signal]:
        """The signals that were put in."""
        signals = [await self._signals.get()]
        while not self._signals.empty():
            signals.append(self._signals.get_nowait())
        return signals

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        """Answers from `history`, or fails with `replay_error`."""
        self.replays.append(start)
        if self.replay_error is not None:
            raise ReplayError(self.replay_error)
        for number, body in sorted((self.history or {}).items()):
            if number >= start:
                yield Batch(number, body)

    async def close(self) -> None:
        """Nothing to give up."""
