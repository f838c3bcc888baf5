"""What a subscriber needs of a transport, and the transport that lives in memory."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstate.errors import ReplayError


@dataclass(frozen=True, slots=True)
class Connected:
    """The subscription is in place; messages published from now on arrive."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is lost; the transport goes on trying."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message as it came, frames from the first to the last."""

    frames: Sequence[bytes]


Signal = Connected | Disconnected | Message


class Transport(Protocol):
    """A connection to one publisher that mends itself.

    Signals come in the order in which things happened: never a message of a new connection before
    its Connected, nor one of an old connection after its Disconnected.
    """

    @property
    def can_replay(self) -> bool:
        """Whether the publisher has a replay endpoint."""

    async def receive(self) -> list[Signal]:
        """The signals that wait, at least one; waits for it."""

    def replay(self, start: int) -> AsyncGenerator[Message]:
        """The publisher's batches from number `start` on, as many as it still has.

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

    history: dict[int, Sequence[bytes]] | None = field(default_factory=dict)
    replays: list[int] = field(default_factory=list)
    replay_error: str | None = None
    _signals: asyncio.Queue[Signal] = field(default_factory=asyncio.Queue)

    @property
    def can_replay(self) -> bool:
        """Whether there is a history to answer from."""
        return self.history is not None

    def put(self, signal: Signal) -> None:
        """Makes a signal happen."""
        self._signals.put_nowait(signal)

    async def receive(self) -> list[Signal]:
        """The signals that were put in."""
        signals = [await self._signals.get()]
        while not self._signals.empty():
            signals.append(self._signals.get_nowait())
        return signals

    async def replay(self, start: int) -> AsyncGenerator[Message]:
        """Answers from `history`, or fails with `replay_error`."""
        self.replays.append(start)
        if self.replay_error is not None:
            raise ReplayError(self.replay_error)
        for number, frames in sorted((self.history or {}).items()):
            if number >= start:
                yield Message(frames)

    async def close(self) -> None:
        """Nothing to give up."""
