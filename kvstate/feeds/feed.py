"""The state machine of one rank's event feed: what its sequence numbers allow us to believe.

It knows sequence numbers and stamps (the publisher's time stamps), never blocks; it is told what
happened and returns what to do, as effects, in order.

    state        means                                                      credits are
    connecting   no connection was made yet                                 none
    replaying    catching up with what was missed                           uncertain
    live         nothing is missing since the first batch that was asked    certain
    degraded     something is missing and could not be had: a hole          certain since the hole
    stale        the connection is lost                                     uncertain
    unsupported  the worker publishes no events                             none

Rules, in the order in which they are tried (n is the number expected next):

    live batch n                 apply
    live batch > n               missed, see below
    live batch < n, known stamp  a duplicate: drop
    live batch < n, other stamp  the publisher restarted: forget everything, see below
    undecodable batch            a hole of one batch
    snapshot                     forget everything; the batches that follow hold all there is
    refused                      the worker publishes nothing
    failed                       an error of our own: a hole, and as a connection that is lost

How what was missed can be had differs (`Recovery`), and with it what a gap, a restart, a new
connection and silence lead to: `kvstate.feeds.asking_feed` asks for a replay, in
`kvstate.feeds.resuming_feed` it comes by itself or not at all.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Generic

from kvstate.feeds.feed_terms import Apply, Body, Demote, Effect, Forget, Numbered, State

# Stamps remembered to tell a duplicate from a restarted publisher. Duplicates come from a replay
# that overtakes the live stream, so they are at most a replay's duration old.
MAX_STAMPS = 4096

# Why a first batch was not the publisher's first, where a connection began with none.
NOTHING_YET = "nothing was received yet: blocks stored before this connection are unknown"

# Without a connection what comes is a remnant of the last one.
_WITHOUT_CONNECTION = (State.CONNECTING, State.STALE, State.UNSUPPORTED)


class Feed(ABC, Generic[Body]):
    """One rank's feed.

    wants_everything: a replay failed; another one, of everything, may mend it.
    """

    def __init__(self) -> None:
        self.state = State.CONNECTING
        self.reason = "not connected yet"
        self.gaps = 0
        self.restarts = 0
        self.replays = 0
        self.wants_everything = False
        self._next: int | None = None
        self._stamps: OrderedDict[int, float] = OrderedDict()
        self._incomplete = ""
        self._unproven: int | None = None  # the batch that, coming again, proves the publisher
        self._snapshot_last: int | None = None

    @property
    def last_sequence(self) -> int | None:
        """Number of the last batch that was taken, None before the first."""
        return self._next - 1 if self._next else None

    @property
    def certain(self) -> bool:
        """Whether what was stored since the last hole can be believed now."""
        return self.state in (State.LIVE, State.DEGRADED)

    @abstractmethod
    def connected(self) -> list[Effect[Body]]:
        """The subscription is in place, for the first time or again."""

    def disconnected(self, reason: str = "connection lost") -> list[Effect[Body]]:
        """The connection is lost, or cannot be made; what happens meanwhile is not seen."""
        self.reason = reason
        if self.state is not State.CONNECTING:  # else there never was one
            self.state = State.STALE
        self._drop_pending()
        return []

    def failed(self, reason: str) -> list[Effect[Body]]:
        """Something went wrong on this side: what came last may not have been taken.

        As a lost connection; `connected` is to follow once it may be tried again.
        """
        self.disconnected(reason)
        self._incomplete = reason
        return [Demote()]

    def refused(self, reason: str) -> list[Effect[Body]]:
        """The publisher says that it has no events; what it said before is worth nothing now."""
        self.state, self.reason = State.UNSUPPORTED, reason
        self._drop_pending()
        self._next = None
        self._stamps.clear()
        return [Forget()]

    def received(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        """A batch of the live stream; while there is no connection, a remnant of the last one."""
        return [] if self.state in _WITHOUT_CONNECTION else self._receive(batch)

    def replayed(self, _: Numbered[Body]) -> list[Effect[Body]]:
        """A batch of the replay that was asked for; nothing where none ever is."""
        return []

    def replay_ended(self) -> list[Effect[Body]]:
        """The replay is complete."""
        return []

    def replay_failed(self, _: str) -> list[Effect[Body]]:
        """The replay was not answered, or broke off, for this reason."""
        return []

    def ask_everything(self) -> list[Effect[Body]]:
        """Some time after a replay failed: ask for all that the publisher still has.

        What is held now is kept and followed until the first answer comes.
        """
        return []

    def snapshot(self, first: int, last: int, unknown_before: int) -> list[Effect[Body]]:
        """Batches `first` to `last`, which come next, hold all that the publisher has."""
        self._drop_pending()
        self._stamps.clear()
        self._next, self._snapshot_last = first, last
        self._incomplete = f"{unknown_before} batches were never seen" if unknown_before else ""
        self.state, self.reason = State.REPLAYING, f"snapshot of batch {last}"
        return [Forget()]

    def healed(self) -> None:
        """Nothing uncertain is left, or the cache was emptied: nothing earlier matters any more."""
        self._incomplete = ""
        self.wants_everything = False
        if self.state is State.DEGRADED:
            self._settle()

    def miss(self, reason: str) -> None:
        """What a batch said is not all known, for a reason that its number does not show."""
        self._incomplete = reason
        if self.state is State.LIVE:
            self._settle()

    @abstractmethod
    def quiet(self, *, for_long: bool = False) -> list[Effect[Body]]:
        """Nothing came for a while, or again nothing for long."""

    @abstractmethod
    def _receive(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        """A batch of the connection that stands."""

    @abstractmethod
    def _missed(self, batch: Numbered[Body], expected: int) -> list[Effect[Body]]:
        """A batch of the live stream that does not follow."""

    @abstractmethod
    def _start_anew(self, reason: str, first: Numbered[Body]) -> list[Effect[Body]]:
        """A batch of the live stream showed that the publisher restarted."""

    def _live(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        expected = self._next
        if expected is None:
            return self._first(batch)
        if batch.sequence == expected:
            return self._take(batch)
        if batch.sequence < expected:
            return self._regress(batch, expected)
        self.gaps += 1
        return self._missed(batch, expected)

    def _first(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        if batch.sequence == 0:
            self._incomplete = ""
        elif self._incomplete in ("", NOTHING_YET):
            self._incomplete = f"batches before {batch.sequence} are unknown"
        effects = self._take(batch)
        self._settle()
        return effects

    def _regress(self, batch: Numbered[Body], expected: int) -> list[Effect[Body]]:
        """A number that was taken before: a duplicate, or a publisher that counts from 0 again."""
        known = self._stamps.get(batch.sequence)
        latest = self._stamps.get(expected - 1, batch.stamp)
        if known == batch.stamp or (known is None and batch.stamp < latest):
            return []
        return self._start_anew(f"batch {batch.sequence} came again with other contents", batch)

    def _take(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        self._next = batch.sequence + 1
        self._stamps[batch.sequence] = batch.stamp
        if len(self._stamps) > MAX_STAMPS:
            self._stamps.popitem(last=False)
        effects: list[Effect[Body]] = []
        if batch.body is None:
            why = f": {batch.fault}" if batch.fault else ""
            effects += self._hole(f"batch {batch.sequence} could not be decoded{why}")
        else:
            effects.append(Apply(batch.body))
        if self._snapshot_last is not None and batch.sequence >= self._snapshot_last:
            self._snapshot_last = None
            self._settle()
        return effects

    def _forget_publisher(self) -> None:
        """It restarted: of what it said nothing is held any more."""
        self.restarts += 1
        self._next = None
        self._stamps.clear()
        self._drop_pending()

    def _drop_pending(self) -> None:
        """Ends what was under way."""
        self._unproven = self._snapshot_last = None

    def _lose(self, first: int, last: int, why: str) -> list[Effect[Body]]:
        return self._hole(f"batches {first} to {last} are lost: {why}")

    def _hole(self, reason: str) -> list[Effect[Body]]:
        self._incomplete = reason
        if self.state is not State.REPLAYING:
            self._settle()
        return [Demote()]

    def _settle(self) -> None:
        """Live if nothing is missing, degraded otherwise."""
        self.state = State.DEGRADED if self._incomplete else State.LIVE
        self.reason = self._incomplete
