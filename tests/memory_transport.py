"""A publisher in the same process, for tests of what follows a feed."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from kvstate.errors import ReplayError
from kvstate.events import Batch, Body
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.transport import Malformed, Signal


@dataclass
class MemoryTransport:
    """An in-process publisher for tests: `receive` returns the signals that were put in.

    history: the batches that a replay returns, by number; None without a replay endpoint. replays:
    where each replay began. signals: those that were put in and not received yet.
    """

    history: dict[int, Body] | None = field(default_factory=dict)
    replays: list[int] = field(default_factory=list)
    replay_error: str | None = None
    recovery: Recovery = Recovery.REPLAY
    why_lost: str = "no replay endpoint"
    signals: asyncio.Queue[Signal] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        if self.history is None and self.recovery is Recovery.REPLAY:
            self.recovery = Recovery.NONE

    def put(self, signal: Signal) -> None:
        """Adds a signal."""
        self.signals.put_nowait(signal)

    async def receive(self) -> list[Signal]:
        """Returns the signals that were put in."""
        signals = [await self.signals.get()]
        while not self.signals.empty():
            signals.append(self.signals.get_nowait())
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
        """Does nothing."""
