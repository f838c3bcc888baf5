"""Watches the credit of a worker while its feed has a fault."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstate.events import Batch
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.transport import FeedTransport, Malformed, Signal
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap
from tests.system.feeds.engine import Cache, Engine, Moment, prompt
from tests.waiting import until

WORKER = "w"

Evidence = Callable[[Signal], bool]


class Row(NamedTuple):
    """One line of the table; times since the fault, in milliseconds, None where there is none.

    wrong: None where the credits were checked only once, when all had settled.
    """

    fault: str
    transport: str
    known_ms: float | None
    right_ms: float | None
    exact_ms: float | None
    how: str
    wrong: int | None = None


class Watched:
    """A transport that records when the first evidence of a fault was passed on, and handled."""

    def __init__(self, inner: FeedTransport) -> None:
        self._inner = inner
        self._evidence: Evidence | None = None
        self.known_at: float | None = None
        self.handled = asyncio.Event()

    def arm(self, evidence: Evidence) -> None:
        """From now on, looks for this evidence."""
        self._evidence = evidence
        self.known_at = None
        self.handled.clear()

    @property
    def recovery(self) -> Recovery:
        """The transport's."""
        return self._inner.recovery

    @property
    def why_lost(self) -> str:
        """The transport's."""
        return self._inner.why_lost

    async def receive(self) -> list[Signal]:
        """The transport's signals; a further call means that the ones before have been handled."""
        if self.known_at is not None:
            self.handled.set()
        signals = await self._inner.receive()
        if self.known_at is None and self._evidence and any(map(self._evidence, signals)):
            self.known_at = asyncio.get_running_loop().time()
        return signals

    def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        """The transport's replay."""
        return self._inner.replay(start)

    async def close(self) -> None:
        """Closes the transport."""
        await self._inner.close()


@dataclass
class Watch:
    """One followed worker, and the repeated lookups of its credit.

    probes: chains of blocks. wrong: the number of lookups that credited something as certain that
    the engine no longer had, although the evidence had been handled. renumbered: the feed has other
    numbers than the engine, so that what it took is only known to date from some moment since the
    fault.
    """

    fault: str
    kind: str
    engine: Engine
    transport: Watched
    fleet: FollowedWorkers
    probes: Sequence[Sequence[int]]
    renumbered: bool = False
    wrong: int = 0
    right_at: float | None = None
    exact_at: float | None = None
    _faulted_at: float = 0.0
    _faulted: Moment = field(default=Moment(0, 0))
    _looking: asyncio.Task[None] | None = field(default=None)

    async def settled(self, *states: FeedState) -> None:
        """Waits until all published batches are taken and the feed is in one of these states."""
        wanted = states or (FeedState.LIVE,)
        await until(lambda: self.has_all() and self.state in wanted, pause=0.001)

    @property
    def state(self) -> FeedState:
        """The feed's."""
        return self.fleet.feeds.state(WORKER)

    @property
    def reason(self) -> str:
        """The feed's."""
        return self.fleet.feeds.statuses(WORKER)[0].reason

    def happens(self, evidence: Evidence, *, to_the_engine: bool = True) -> None:
        """Watches a fault that happens now, to the engine or others; evidence: its first sign."""
        self._faulted_at = asyncio.get_running_loop().time()
        self._faulted = Moment(self.engine.life, self.engine.sequence - (not to_the_engine))
        self.transport.arm(evidence)
        self._looking = asyncio.create_task(self._look())

    async def row(self, how: str) -> Row:
        """Returns the result, once all has settled; fails if too much was credited meanwhile."""

        def is_measured() -> bool:
            return self.right_at is not None and not (self.exact_at is None and self.is_exact())

        await until(is_measured, pause=0.001)
        assert self.right_at is not None
        await self._stop()
        assert not self.wrong, f"{self.wrong} times too much was credited"
        known_at = self.transport.known_at
        assert known_at is not None, "no evidence of the fault was ever handed on"
        known_ms, right_ms = self._since(known_at), self._since(self.right_at)
        exact_ms = None if self.exact_at is None else self._since(self.exact_at)
        return Row(self.fault, self.kind, known_ms, right_ms, exact_ms, how, self.wrong)

    async def close(self) -> None:
        """Ends all."""
        await self._stop()
        await self.fleet.close()
        await self.engine.end()

    def credited(self, probe: Sequence[int]) -> Overlap:
        """The part of a prompt that is credited to the worker."""
        return self.fleet.blocks.overlaps(prompt(probe)).get(WORKER, Overlap(1))

    def certain(self) -> list[int]:
        """Blocks credited as certain, of each probe."""
        return [sum(self.credited(probe).tiers) for probe in self.probes]

    def held(self) -> list[int]:
        """Blocks that the engine really has now, of each probe."""
        return [self.engine.cache.overlap(probe) for probe in self.probes]

    def is_exact(self) -> bool:
        """Whether the certain credit equals the engine's cache."""
        return self.certain() == self.held()

    def is_honest(self) -> bool:
        """Whether all certain credit is in the engine's cache."""
        pairs = zip(self.certain(), self.held(), strict=True)
        return all(certain <= held for certain, held in pairs)

    def has_all(self) -> bool:
        if self.fleet.feeds.statuses(WORKER)[0].unapplied:
            return False
        if self.renumbered:
            return self.state is not FeedState.LIVE or self.is_exact()
        taken = self.fleet.feeds.statuses(WORKER)[0].last_sequence
        return (-1 if taken is None else taken) == self.engine.sequence - 1

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0.0005)
            if not self.transport.handled.is_set():
                continue
            if self._credits_too_much():
                self.wrong += 1
                self.right_at = None
            elif self.right_at is None and self._is_settled():
                self.right_at = loop.time()
            if not (self.has_all() and self.is_exact()):
                self.exact_at = None
            elif self.exact_at is None:
                self.exact_at = loop.time()

    def _credits_too_much(self) -> bool:
        """Whether more is certain than the engine had at any of the moments of `_then`."""
        held = [max(cache.overlap(probe) for cache in self._then()) for probe in self.probes]
        return any(sure > real for sure, real in zip(self.certain(), held, strict=True))

    def _then(self) -> list[Cache]:
        """What the engine held after the last applied batch, and after each one taken since."""
        if self.renumbered:
            since = (
                cache for moment, cache in self.engine.truth.items() if moment >= self._faulted
            )
            return [Cache(), *since]
        taken = self.fleet.feeds.statuses(WORKER)[0].last_sequence
        last = -1 if taken is None else taken
        numbers = range(last - self.fleet.feeds.statuses(WORKER)[0].unapplied, last + 1)
        moments = (Moment(self.engine.life, number) for number in numbers)
        return [self.engine.truth.get(moment, Cache()) for moment in moments]

    def _is_settled(self) -> bool:
        """Whether the credit is exact, or the feed reports that it is not."""
        if self.state is FeedState.LIVE:
            return self.has_all() and self.is_exact()
        return self.state in (FeedState.DEGRADED, FeedState.STALE, FeedState.UNSUPPORTED)

    def _since(self, at: float) -> float:
        return 1000 * (at - self._faulted_at)

    async def _stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking
