"""A rank whose feed another process of this host follows: repeats here what happened there."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvstate.errors import DamagedError, WireError
from kvstate.events import Body, EngineLoad, Loss
from kvstate.feeds.feed import FeedState, Restoration
from kvstate.feeds.feed_news import NoteLoss
from kvstate.index.core import Outcome
from kvstate.index.owner import Owner
from kvstate.relay.holdings import Arriving, putting
from kvstate.relay.records import (
    Beginning,
    Kind,
    Record,
    RelayedStatus,
    beginning_in,
    status_in,
    typed_batch,
)
from kvstate.rows.format import SavedFeed
from kvstate.steps import Steps

NOT_PASSED_ON = "the process that follows the feeds has not passed it on yet"


@dataclass(slots=True)
class RelayedFeed:
    """What is shown of a feed; the fields are those of `kvstate.feeds.feed.Feed`."""

    state: FeedState = FeedState.CONNECTING
    last_sequence: int | None = None
    gaps: int = 0
    replays: int = 0
    restarts: int = 0
    dropped: int = 0
    incomplete: str = ""
    wants_everything: bool = False


class RelayedRank:
    """One rank, without a connection of its own.

    emptied, cut: see `kvstate.fleet.FollowedWorkers`. The other attributes are those of a
    subscriber, which it stands for.
    """

    restoration = Restoration.NONE

    def __init__(self, owner: Owner, emptied: NoteLoss, cut: Callable[[], None]) -> None:
        self.owner = owner
        self.feed = RelayedFeed()
        self.reason = NOT_PASSED_ON
        self.counts: dict[str, int] = {}
        self.lag_seconds = 0.0
        self.load: EngineLoad | None = None
        self.load_at = -math.inf
        self.unapplied = 0
        self._emptied = emptied
        self._cut = cut
        self._arriving = Arriving[Beginning]()
        self._work: Steps[None] | None = None

    def remove(self) -> None:
        """Ends what is under way, before its owner is gone, or a feed of this process has it."""
        if self._work is not None:
            self._work.close()

    def working(self, steps: Steps[None]) -> Steps[None]:
        """Does some work on what it holds, in steps, one piece at a time; `remove` ends it."""
        self._work = steps
        try:
            yield from steps
        finally:
            self._work = None

    def lose(self, reason: str) -> None:
        """Notes that nothing is passed on any more: nothing is certain until something is."""
        self.owner.trusted = False
        self.reason = reason
        self._arriving.begin(None)
        if self.feed.state is not FeedState.CONNECTING:
            self.feed.state = FeedState.STALE

    def leaving(self) -> Steps[None]:
        """Notes, in steps, that the other process follows this rank no more."""
        self.lose(NOT_PASSED_ON)
        self.feed.state = FeedState.CONNECTING
        yield from self.owner.forgetting()

    def position(self, number: int, stamp: float) -> SavedFeed | None:
        """Returns where its feed was after its last batch, None if there was none."""
        if not math.isfinite(stamp):
            return None
        feed = self.feed
        stamps = ((number, stamp),)
        saved = SavedFeed(number + 1, stamps, stamp, feed.incomplete, feed.wants_everything)
        return saved if saved.is_sound else None

    def taking(self, record: Record, outcome: Outcome | None) -> Steps[None]:
        """Repeats what a record says, in steps.

        outcome: what the core has done of a batch; None if nothing.

        Raises:
            DamagedError: it is not possible here.
        """
        yield from self.working(self._repeating(record, outcome))

    def _repeating(self, record: Record, outcome: Outcome | None) -> Steps[None]:
        match record.kind:
            case Kind.BATCH | Kind.CHANGES | Kind.TYPED:
                yield from self._applying(_body(record, outcome), outcome)
            case Kind.FORGET:
                yield from self.owner.forgetting()
            case Kind.DEMOTE:
                self.owner.trusted = False
                yield from self.owner.demoting()
            case Kind.STATUS:
                self._show(status_in(record.payload))
            case Kind.BEGIN:
                self._arriving.begin(beginning_in(record.payload))
            case Kind.END:
                yield from self._beginning_again(status_in(record.payload))
            case other if not self._arriving.take(other, record.payload):
                yield from self.leaving()

    def _applying(self, body: Body, outcome: Outcome | None) -> Steps[None]:
        try:
            if outcome is None:
                result = yield from self.owner.applying(body)
            else:
                result = yield from self.owner.finishing(body, outcome)
        except WireError:
            return  # it was a hole there as well, which follows
        if result.clears:
            self._emptied(Loss.CLEARED)

    def _beginning_again(self, status: RelayedStatus) -> Steps[None]:
        beginning, holding = self._arriving.end()
        self.owner.trusted = False
        yield from putting(self.owner, beginning.saved, holding)
        self.owner.shares = beginning.shares
        self.feed.restarts = status.restarts
        self._show(status)

    def _show(self, status: RelayedStatus) -> None:
        feed, before = self.feed, self.feed.state
        if status.restarts > feed.restarts:
            self._emptied(Loss.RESTARTED)
        feed.state = status.state
        feed.last_sequence = status.last_sequence
        feed.gaps, feed.replays = status.gaps, status.replays
        feed.restarts, feed.dropped = status.restarts, status.dropped
        feed.incomplete, feed.wants_everything = status.incomplete, status.wants_everything
        self.reason = status.reason
        self.counts = status.counts
        self.lag_seconds = status.lag_seconds
        self.load, self.load_at = status.load, status.load_at
        self.unapplied = status.unapplied
        self.owner.trusted = status.trusted
        if before is not FeedState.STALE and feed.state is FeedState.STALE:
            self._cut()


def _body(record: Record, outcome: Outcome | None) -> Body:
    """Returns the batch of a record, which is not read again if the core has repeated it.

    Raises:
        DamagedError: the core could not repeat changes.
    """
    if record.kind == Kind.CHANGES and outcome is None:
        raise DamagedError("changes that cannot be repeated")
    return typed_batch(record.payload) if record.kind == Kind.TYPED else record.payload
