"""Carries out the effects of one feed on its sink: the index, or a bridge's mirror."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvstate.errors import WireError
from kvstate.events import Batch, BatchResult, Body
from kvstate.feeds.allowance import Allowance
from kvstate.feeds.feed import Demote, Effect, Feed, Forget, RequestReplay
from kvstate.feeds.feed_news import FeedNews
from kvstate.feeds.turns import Turns
from kvstate.steps import Pace, Steps


class Sink(Protocol):
    """The target of one rank's feed: the index, or a bridge's mirror of the worker.

    Long operations are iterators of short steps; if they are stopped early, the rest stays undone.
    """

    def applying(self, body: Body) -> Steps[BatchResult]:
        """Applies one batch.

        Raises:
            WireError: it is not an event batch; nothing was changed.
        """

    def forgetting(self) -> Steps[None]:
        """Forgets all blocks: the publisher restarted."""

    def demoting(self) -> Steps[None]:
        """Makes the blocks held uncertain: there is a hole."""

    def trust(self, *, trusted: bool) -> None:
        """Sets whether certain blocks count as certain now."""


class Witness(Protocol):
    """Sees each effect on the sink when it is complete, or a step before."""

    def note_restored(self, number: int, stamp: float) -> None:
        """Notes that the sink holds what was saved after this batch."""

    def note_applied(self, batch: Batch) -> None:
        """Notes that a batch was applied."""

    def note_forgotten(self) -> None:
        """Notes that everything is being forgotten."""

    def note_demoted(self) -> None:
        """Notes that everything is becoming uncertain."""

    def note_trust(self, *, trusted: bool) -> None:
        """Notes whether certain blocks count as certain now, whenever effects are carried out."""


class RequestedReplay(Protocol):
    """The replay that the feed requested last, if it is under way."""

    def start(self, start: int, /) -> None:
        """Starts one from this number on, as soon as it may begin."""

    def stop(self) -> None:
        """Stops it: what it would bring does not reach the feed."""


class NoWitness:
    """Sees nothing that matters."""

    def note_restored(self, number: int, stamp: float) -> None:
        """Part of `Witness`."""

    def note_applied(self, batch: Batch) -> None:
        """Part of `Witness`."""

    def note_forgotten(self) -> None:
        """Part of `Witness`."""

    def note_demoted(self) -> None:
        """Part of `Witness`."""

    def note_trust(self, *, trusted: bool) -> None:
        """Part of `Witness`."""


class Visit(NamedTuple):
    """Work on the sink between two batches, in steps: saving it, or restoring it.

    begin: begins the work.
    """

    begin: Callable[[], Steps[None]]


# Effects that lower the credit.
_LOWERING = frozenset({Demote, Forget})


class Effects:
    """The effects of one feed that are not carried out yet.

    replay: is started and stopped as the feed requests. allowance: of the worker; None if
    unlimited. witness: sees each effect.
    """

    def __init__(
        self,
        feed: Feed,
        sink: Sink,
        turns: Turns,
        news: FeedNews,
        replay: RequestedReplay,
        allowance: Allowance | None = None,
        witness: Witness | None = None,
    ) -> None:
        self._feed = feed
        self._witness = witness or NoWitness()
        self._sink = sink
        self._turns = turns
        self._news = news
        self._replay = replay
        self._allowance = allowance
        self._pending: deque[Effect | Visit] = deque()
        self._work: Steps[None] | None = None  # the effect that is under way
        self._pace: Pace | None = None  # of its last step
        self._healed = False

    def __len__(self) -> int:
        return len(self._pending) + (self._work is not None)

    def drop(self) -> None:
        """Drops the effects that are not carried out yet."""
        if self._work is not None:
            self._work.close()
            self._end_work()
        self._pending.clear()
        self._healed = False

    def put_off(self, effects: Sequence[Effect]) -> None:
        """Queues effects to precede the next ones; nothing is certain until they are done."""
        self._pending.extend(effects)
        self._trust(trusted=False)

    async def await_allowance(self) -> None:
        """Waits while the worker has used up its allowance."""
        now = asyncio.get_running_loop().time
        if self._allowance is None:
            return
        while (seconds := self._allowance.wait_seconds(now())) > 0:  # noqa: ASYNC110 - no event
            await asyncio.sleep(seconds)

    async def carry_out(
        self, effects: Sequence[Effect | Visit], began_at: float | None = None
    ) -> None:
        """Carries out effects, then updates the sink's trust.

        began_at: the loop's time when work on their cause began, in seconds; None for now.

        Live stream and replay both call this; effects are carried out in the order in which the
        feed returned them, whoever carries them out. Demote and Forget withdraw trust at once,
        ahead of queued batches, and RequestReplay stops the replay under way: the feed takes the
        end of any replay for that of the one it requested last.
        """
        if began_at is None:
            began_at = asyncio.get_running_loop().time()
        self._pending.extend(effects)
        kinds = set(map(type, effects))
        if RequestReplay in kinds:
            self._replay.stop()
        if not self._feed.certain or not _LOWERING.isdisjoint(kinds):
            self._trust(trusted=False)
        while self._pending or self._work is not None:
            if self._pace is Pace.WAITS or self._turns.is_over():
                self._spend(began_at)
                await self._turns.next(self._news.place.worker)
                if self._pace is None:  # nothing of another worker waits for it
                    await self.await_allowance()
                began_at = asyncio.get_running_loop().time()
            self._step()
        if self._healed:
            self._healed = False
            self._feed.heal()
        self._news.note_behind(is_behind=self._spend(began_at))
        self._trust(trusted=self._feed.certain and not self._news.is_behind)
        self._news.tell_change()

    def _spend(self, began_at: float) -> bool:
        """Charges the time since `began_at` to the worker; returns whether it is behind."""
        if self._allowance is None:
            return False
        now = asyncio.get_running_loop().time()
        self._allowance.spend(now - began_at, now)
        return self._allowance.is_behind(now)

    def _step(self) -> None:
        """Does one step of the next effect, unless another task did it meanwhile."""
        if self._work is None:
            if not self._pending:
                return
            self._work = self._carrying_out(self._pending.popleft())
        work = self._work
        try:
            self._pace = next(work)
        except StopIteration:
            self._end_work()
        except BaseException:
            self._end_work()
            raise

    def _end_work(self) -> None:
        self._work = self._pace = None

    def _carrying_out(self, effect: Effect | Visit) -> Steps[None]:
        match effect:
            case Batch(body=body):
                try:
                    result = yield from self._sink.applying(body)
                except WireError as error:
                    yield from self._missing(error)
                else:
                    self._note(result)
                    self._witness.note_applied(effect)
            case Forget():
                self._witness.note_forgotten()
                yield from self._sink.forgetting()
                self._healed = False  # a hole is noted from here on
                self._news.tell_restart()
            case Demote():
                self._witness.note_demoted()
                yield from self._sink.demoting()
                self._healed = False
            case RequestReplay(start=start):
                self._replay.start(start)
            case Visit(begin=begin):
                yield from begin()

    def _missing(self, error: WireError) -> Steps[None]:
        """Handles a batch that could not be decoded: a hole."""
        self._news.tell_undecodable(error)
        self._trust(trusted=False)
        self._witness.note_demoted()
        yield from self._sink.demoting()
        self._healed = False
        self._feed.miss(f"a batch could not be decoded: {error}")

    def _trust(self, *, trusted: bool) -> None:
        self._sink.trust(trusted=trusted)
        self._witness.note_trust(trusted=trusted)

    def _note(self, result: BatchResult) -> None:
        self._news.count_result(result)
        if result.missed:
            self._healed = False
            self._feed.miss(result.missed)
        elif result.healed:
            self._healed = True
