"""The state machine of one rank's event feed: what can be concluded from its sequence numbers.

It knows sequence numbers and stamps (the publisher's time stamps), never blocks. The caller reports
what happens through its methods, which return what to do as effects, in order.

    state        means                                                      credits are
    connecting   no connection was made yet                                 none
    replaying    catching up with what was missed                           uncertain
    live         nothing is missing since the first batch that was asked    certain
    degraded     something is missing and could not be had: a hole          certain since the hole
                 a snapshot does not end                                    uncertain until one does
    stale        the connection is lost                                     uncertain
    unsupported  the worker publishes no events                             none

Effects: apply a batch; `Demote`, a hole: stored blocks become uncertain; `Forget`, nothing is held
any more; `RequestReplay`, request batches again.

The rules, in the order in which they are tried; n is the number expected next. Missed batches can
be replayed on request (`Recovery.REPLAY`), or a new connection brings them, or they are lost.

    event                        where it can be asked for       elsewhere
    connected at first           replay everything               what was before is not known
    connected again              replay from n - 1               a hole; where it resumes, wait for
                                                                 n - 1, a queue's n proves itself
    any without a connection     drop                            drop
    batch in a replay            hold it                         -
    batch n - 1 after resuming   -                               nothing was missed
    another one after resuming   -                               a hole (of a queue: none), go on
    batch n                      apply                           apply
    batch > n                    hold it, replay from n - 1      a hole, apply
    batch < n, known stamp       a duplicate: drop               a duplicate: drop
    batch < n, other stamp       restarted: forget, hold it,     restarted: forget, apply; what was
                                 replay everything               before it is not known
    some < n, never received     drop, replay from n - 1         likewise
    batch that is undecodable    a hole of one batch             a hole of one batch
    replayed n                   apply; if n - 1 did not come,   -
                                 it is gone: a hole before
    replayed > n                 n is gone: a hole, apply        -
    replayed < n, other stamp    restarted: forget, replay       -
    replay ends before n - 1     restarted: forget, replay       -
    replay ends short of a held  ask on if it brought anything   -
    replay ends or fails         take what is held, with a hole  -
                                 where it does not follow n
    replay failed, later         ask for everything; its first   -
                                 answer replaces what is held
    replay after restore fails   ask from n - 1 again, twice     -
    silence                      replay from n - 1, once, then   a hole where it resumes; a queue
                                 seldom: a last one may be lost  may have nothing to say
    restarts in a row            replays contradict the live     -
                                 stream: none until reconnection
    snapshot                     forget; what follows is all     forget; what follows is all
    none ends for long           -                               degraded until one ends
    lost, or it cannot be made   drop what is pending            drop what is pending
    refused                      forget                          forget
    failed, on our side          a hole, and as lost             a hole, and as lost
    missed within a batch        degraded until healed           degraded until healed
    healed                       nothing earlier matters         nothing earlier matters

A feed that begins where a saved one was (`restore`) holds blocks that nothing proves yet. So its
first replay begins at n - 1 as well. If that batch comes, the feed is where it would be after a
lost connection. If not, it forgets what was restored, and continues as one that was never
connected. Without replays it forgets at once.

The possible next states, by their first letters (S for stale; a dot: always the same state):

    event           C     R     L     D     S     U
    connected       RD    .     RD    RD    RD    RD
    disconnected    .     S     S     S     .     S
    failed          .     S     S     S     .     S
    refused         U     U     U     U     U     .
    received        .     RLD   RLD   RLD   .     .
    replayed        .     RLD   RLD   RD    .     .
    replay_ended    .     RLD   RLD   RD    .     .
    replay_failed   .     RLD   .     .     .     .
    ask_again       .     .     .     .     .     .
    ask_everything  .     .     .     .     .     .
    snapshot        R     .     R     RD    R     R
    snapshot_late   .     RD    .     .     .     .
    healed          .     .     .     LD    .     .
    miss            .     .     D     .     .     .
    quiet           .     RD    .     .     .     .

A replay begins at n - 1 and not at n, so that its first batch proves that the publisher is still
the same one: vLLM and SGLang send nothing when they start or stop. A connection that resumes starts
at n - 1 for the same reason. A queue never repeats: n proves that nothing was lost, and a restarted
queue begins with an event of its own.

A publisher that restarted without losing its connection replays the batches received since. If one
seems to restart again and again, and its replays never contain the batches received live, there are
two publishers: the replay endpoint is another worker's. Its replays are then ignored.
"""

from enum import StrEnum
from math import isfinite

import msgspec

from kvstate.events import Batch
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.held_batches import HeldBatches
from kvstate.feeds.replay_trust import ReplayTrust
from kvstate.feeds.stamps import Doubt, Stamps
from kvstate.rows.format import MAX_REASON, SavedFeed


class FeedState(StrEnum):
    """The state of a feed; the module's table says what credits it allows."""

    CONNECTING = "connecting"
    REPLAYING = "replaying"
    LIVE = "live"
    DEGRADED = "degraded"
    STALE = "stale"
    UNSUPPORTED = "unsupported"


class Restoration(StrEnum):
    """What became of the blocks with which a feed began.

    NONE: it began with none. UNPROVEN: nothing has proven yet that its publisher is the one that
    stored them; they are uncertain. PROVEN: it is. LOST: it could not be proven.
    """

    NONE = "none"
    UNPROVEN = "unproven"
    PROVEN = "proven"
    LOST = "lost"


class Forget(msgspec.Struct, frozen=True):
    """Everything stored so far is gone: the publisher restarted."""


class Demote(msgspec.Struct, frozen=True):
    """Everything stored so far is uncertain: there is a hole."""


class RequestReplay(msgspec.Struct, frozen=True):
    """Request the publisher's batches from this number on; replaces a replay under way."""

    start: int


# A batch to apply.
Effect = Batch | Forget | Demote | RequestReplay

# How often the replay that follows what was restored is asked for, if it fails.
RESTORING_TRIES = 3

# How many stamps of the last batches are saved: the last one is the proof.
SAVED_STAMPS = 8

# Why the first batch received was not the publisher's first.
NOTHING_YET = "nothing was received yet: blocks stored before this connection are unknown"
SNAPSHOT_LATE = "a snapshot of everything began and does not end"
OTHER_PUBLISHER = (
    "its replays contradict what it publishes: is `replay` the endpoint of another worker?"
)

# A batch that arrives without a connection is a remnant of the last one.
_WITHOUT_CONNECTION = (FeedState.CONNECTING, FeedState.STALE, FeedState.UNSUPPORTED)


class Feed:
    """One rank's feed, not connected yet.

    recovery: how missed batches are recovered. held: for live batches during a replay. stamps: of
    the batches that it took. why_lost: why batches are lost, as `FeedTransport` says it.
    wants_everything: a replay failed, and a complete one may repair this. wants_retry: the replay
    that follows what was restored failed, and is to be asked for again. restoration: what became of
    the blocks with which it began. dropped: counts the live batches that were dropped because of
    their number.
    """

    def __init__(
        self,
        recovery: Recovery,
        held: HeldBatches | None = None,
        stamps: Stamps | None = None,
        *,
        why_lost: str = "no replay",
    ) -> None:
        self.state = FeedState.CONNECTING
        self.reason = "not connected yet"
        self.gaps = 0
        self.restarts = 0
        self.replays = 0
        self.dropped = 0
        self.wants_everything = False
        self.wants_retry = False
        self.restoration = Restoration.NONE
        self._recovery = recovery
        self._why_lost = why_lost
        self._asks = recovery is Recovery.REPLAY
        self._next: int | None = None
        self._stamps = Stamps() if stamps is None else stamps
        self._doubt = Doubt()
        self._incomplete = ""
        self._tries = 0  # left, for the replay that follows what was restored
        self._unproven: int | None = None  # this batch, repeated, proves the publisher
        self._snapshot_last: int | None = None
        self._is_snapshot_late = False
        # only for publishers with replays
        self._held_batches = held or HeldBatches()
        self._asked_at: int | None = None
        self._overtaken: int | None = None  # the number expected before a replay started over
        self._proof: float | None = None  # the stamp of the batch that proves the publisher
        self._asks_everything = False
        self._has_heard = False
        self._replay_trust = ReplayTrust()

    @property
    def last_sequence(self) -> int | None:
        """Number of the last batch accepted, None before the first."""
        return self._next - 1 if self._next else None

    @property
    def certain(self) -> bool:
        """Whether blocks stored since the last hole are certain now."""
        if self._is_snapshot_late:
            return False
        return self.state is FeedState.LIVE or self.state is FeedState.DEGRADED

    @property
    def incomplete(self) -> str:
        """Why something is missing, "" if nothing is."""
        return self._incomplete[:MAX_REASON]

    @property
    def is_in_snapshot(self) -> bool:
        """Whether batches of a snapshot are still to come."""
        return self._snapshot_last is not None

    @property
    def _has_replays(self) -> bool:
        """Whether the publisher has replays that can be trusted."""
        return self._asks and not self._replay_trust.is_lost

    def saved(self) -> SavedFeed | None:
        """Returns where it is, for `restore`; None if the publisher could not be proven then.

        It describes the blocks held once all effects returned so far are carried out.
        """
        if not self._asks or not self._next or self._asks_everything:
            return None
        last = self._stamps.last(SAVED_STAMPS)  # an undecodable batch has no stamp
        stamps = tuple((number, stamp) for number, stamp in last if isfinite(stamp))
        saved = SavedFeed(
            self._next,
            stamps,
            self._stamps.newest,
            self.incomplete,
            self.wants_everything,
        )
        return saved if saved.is_sound else None

    def restore(self, saved: SavedFeed) -> None:
        """Begins where a saved feed was, whose blocks are in the sink by now, before it connects.

        They are uncertain until the publisher repeats the last batch.

        Raises:
            ValueError: the publisher repeats none.
        """
        if not self._asks:
            raise ValueError("without replays, nothing restored can be proven")
        self._next = saved.next
        self._stamps.restore(saved.stamps, saved.newest)
        self._incomplete = saved.incomplete
        self.wants_everything = saved.wants_everything
        self.restoration = Restoration.UNPROVEN
        self._tries = RESTORING_TRIES

    def connect(self) -> list[Effect]:
        """Notes that the subscription is in place, for the first time or again."""
        self._is_snapshot_late = False
        if self._asks:
            self._has_heard = True  # it may take effect only after the replay and one more batch
            self.wants_everything |= not self._has_replays  # replays may be this publisher's now
            self._replay_trust.begin()
            return self._ask("connected")
        is_without = self._recovery is Recovery.NONE
        if self._next is None:
            unknown = f"{self._why_lost}: blocks stored before this connection are unknown"
            self._incomplete = unknown if is_without else NOTHING_YET
            self._settle()
        elif is_without:
            return self._hole(f"the connection was lost and there is {self._why_lost}")
        else:
            self._unproven = self._next - 1
            self.state, self.reason = FeedState.REPLAYING, f"resuming after batch {self._unproven}"
        return []

    def disconnect(self, reason: str = "connection lost") -> list[Effect]:
        """Handles a connection that is lost or cannot be made; events sent meanwhile are missed."""
        self.reason = reason
        if self.state is not FeedState.CONNECTING:  # else there never was one
            self.state = FeedState.STALE
        self._drop_pending()
        return []

    def fail(self, reason: str) -> list[Effect]:
        """Notes an error on this side: the last batches may not have been applied.

        It is treated as a lost connection; the caller calls `connect` to try again.
        """
        self.disconnect(reason)
        self._incomplete = reason
        self.wants_everything = self._asks
        return [Demote()]

    def refuse(self, reason: str) -> list[Effect]:
        """Handles the publisher's report that it has no events; its earlier ones are forgotten."""
        self.state, self.reason = FeedState.UNSUPPORTED, reason
        self._drop_pending()
        self._next = None
        self._lose_restored()
        self._stamps.clear()
        return [Forget()]

    def receive(self, batch: Batch) -> list[Effect]:
        """Handles a batch of the live stream, or a remnant of the last connection."""
        if self.state in _WITHOUT_CONNECTION:
            return []
        if self._asks:
            self._has_heard = True
            self._replay_trust.note_live(batch)
            if self.state is FeedState.REPLAYING:
                self._held_batches.append(batch)
                return []
        elif self._unproven is not None:
            return self._resume(batch, self._unproven)
        return self._live(batch)

    def receive_replayed(self, batch: Batch) -> list[Effect]:
        """Handles a batch of the requested replay."""
        if not self._has_replays or self.state in _WITHOUT_CONNECTION:
            return []
        self._replay_trust.note_replayed(batch)
        effects: list[Effect] = []
        if self._asks_everything:
            effects += self._start_over()
        if self._is_unproven and self._next is not None and batch.sequence >= self._next:
            effects += self._forget_restored()
        expected = self._next
        if expected is not None and batch.sequence < expected:
            return self._overlap(batch)
        if expected is None:
            if batch.sequence > 0:
                self._incomplete = f"batches before {batch.sequence} are no longer available"
        elif batch.sequence > expected:
            effects += self._lose(
                expected, batch.sequence - 1, "no longer in the publisher's buffer"
            )
        elif self._unproven is not None:
            effects += self._hole(f"batch {self._unproven} is gone: maybe another publisher")
        self._unproven = None
        return effects + self._take(batch)

    def end_replay(self) -> list[Effect]:
        """Notes that the replay is complete."""
        if not self._has_replays or self.state in _WITHOUT_CONNECTION:
            return []
        self._replay_trust.note_answer()
        if self._unproven is not None or self._asks_everything:
            return self._restart("the publisher counts from 0 again")
        if self._next is None and not self._held_batches:
            self._next = 0
        first = (
            self._overtaken
            if self._held_batches.first_sequence is None
            else self._held_batches.first_sequence
        )
        if first is not None and self._next != self._asked_at and first > (self._next or 0):
            return self._ask("more was missed meanwhile")
        self._tries = 0
        return self._catch_up("missing in the replay")

    def fail_replay(self, reason: str) -> list[Effect]:
        """Notes that the replay failed or broke off, for this reason."""
        self._asks_everything = False
        if not self._asks or self.state is not FeedState.REPLAYING:
            return []  # nothing is repaired or proven by it
        if self._tries > 1:
            self._tries -= 1
            self.wants_retry = True
            return []
        self.wants_everything = True
        self._doubt.is_unanswered = self._doubt.is_asked
        self._lose_restored()  # a hole; a complete replay will replace what is held
        failed = f"replay failed: {reason}"
        if self._next is not None:
            return [*self._hole(failed), *self._catch_up(failed)]
        self._incomplete = f"{failed}; earlier blocks are unknown"
        return self._catch_up(failed)

    def ask_again(self) -> list[Effect]:
        """Requests what follows what was restored again, some time after that replay failed."""
        is_wanted = self.wants_retry and self.state is FeedState.REPLAYING
        return self._ask("the replay failed, asking again") if is_wanted else []

    def ask_everything(self) -> list[Effect]:
        """Requests all batches that the publisher still has, some time after a replay failed.

        The present blocks are kept and updated until the first answer arrives.
        """
        is_wanted = self.wants_everything and self.certain and self._has_replays
        if not is_wanted or self._asks_everything:
            return []
        self._asks_everything = True
        self.replays += 1
        self._unproven = None
        self._asked_at = None
        return [RequestReplay(0)]

    def snapshot(self, first: int, last: int, unknown_before: int) -> list[Effect]:
        """Notes that a snapshot of all the publisher has follows: batches `first` to `last`."""
        is_late = self._is_snapshot_late
        self._drop_pending()
        self._stamps.clear()
        self._next, self._snapshot_last = first, last
        self._incomplete = f"{unknown_before} batches were never received" if unknown_before else ""
        self.state, self.reason = FeedState.REPLAYING, f"snapshot of batch {last}"
        if is_late:
            self.note_late_snapshot()
        return [Forget()]

    def note_late_snapshot(self) -> list[Effect]:
        """Notes that a snapshot, and those begun instead of it, have not ended for long.

        What they contain stays uncertain until one ends, since removals come only then.
        """
        if self.is_in_snapshot and not self._asks and self.state is FeedState.REPLAYING:
            self._is_snapshot_late = True
            self._settle()
        return []

    def heal(self) -> None:
        """Forgets earlier holes: nothing of what was missed matters any more.

        Nothing uncertain is left, or the cache was emptied, or replaced (`kvstate.index.turnover`).
        This raises no credit: in a degraded feed, blocks stored since the hole are certain already.
        """
        self._incomplete = ""
        self.wants_everything = False
        if self.state is FeedState.DEGRADED:
            self._settle()

    def miss(self, reason: str) -> None:
        """Notes that a part of a batch is not known, for a reason other than its number."""
        self._incomplete = reason
        if self.state is FeedState.LIVE:
            self._settle()

    def quiet(self, *, for_long: bool = False) -> list[Effect]:
        """Handles silence: no batch for a while, or (for_long) for another long while.

        Requests a replay to check whether the last batch was lost, once and then seldom; or stops
        waiting for the batch that proves that none was.
        """
        if self._asks:
            heard, self._has_heard = self._has_heard, False
            can_ask = self.certain and self._has_replays and not self._asks_everything
            return self._request() if can_ask and (heard or for_long) else []
        if self._unproven is None or self._recovery is Recovery.QUEUED:
            return []  # a snapshot, and a queue that may have lost events, keep waiting
        return self._end_resuming(f"batch {self._unproven} did not come again: another publisher?")

    # Batches of the live stream

    def _live(self, batch: Batch) -> list[Effect]:
        expected = self._next
        if batch.sequence == expected:
            return self._take(batch)
        if expected is None:
            return self._first(batch)
        if batch.sequence < expected:
            return self._regress(batch, expected)
        self.gaps += 1
        if not self._has_replays:
            why = OTHER_PUBLISHER if self._asks else self._why_lost
            return self._lose(expected, batch.sequence - 1, why) + self._take(batch)
        self._held_batches.append(batch)
        return self._ask(f"batches {expected} to {batch.sequence - 1} were missed")

    def _first(self, batch: Batch) -> list[Effect]:
        if batch.sequence == 0:
            self._incomplete = ""
        elif self._incomplete in ("", NOTHING_YET):
            self._incomplete = f"batches before {batch.sequence} are unknown"
        effects = self._take(batch)
        self._settle()
        return effects

    def _regress(self, batch: Batch, expected: int) -> list[Effect]:
        """Handles an earlier number: a duplicate, or a publisher that counts from 0 again."""
        reason = f"batch {batch.sequence} came again with different content"
        if not self._stamps.is_other(batch.sequence, batch.stamp):
            if not self._is_doubted(batch, expected):
                self.dropped += 1
                return []
            reason = "batches with lower numbers came that it never sent before"
            if self._has_replays and not self._doubt.is_unanswered:
                self.dropped += 1
                return self._ask_about_doubt(reason)
        if not self._asks:
            self._forget_publisher()
            self._incomplete = f"publisher restarted: {reason}; its first batches were missed"
            self._settle()
            return [Forget(), *self._first(batch)]
        effects = self._restart(reason)
        self._replay_trust.note_live(batch)
        if not self._has_replays:
            return effects + self._first(batch)
        self._held_batches.append(batch)
        return effects

    def _is_doubted(self, batch: Batch, expected: int) -> bool:
        """Whether several batches came that the publisher cannot have sent before."""
        is_strange = self._stamps.was_never_taken(batch.sequence)
        return is_strange and self._doubt.note(batch.sequence, expected)

    def _ask_about_doubt(self, reason: str) -> list[Effect]:
        """Requests the last batch again, as proof that the publisher is the same; asks once."""
        if self._doubt.is_asked:
            return []
        self._doubt.is_asked = True
        return self._ask(f"has the publisher restarted? {reason}")

    def _resume(self, batch: Batch, unproven: int) -> list[Effect]:
        """Handles a batch of a new connection, whose publisher is not known to be the same yet."""
        if batch.sequence <= unproven:
            if self._stamps.get(batch.sequence) != batch.stamp:
                return self._regress(batch, unproven + 1)
            self._unproven = None
            self._settle()
            return []
        lost = self._end_resuming(f"batch {unproven} is gone: maybe another publisher")
        return lost + self._live(batch)

    def _end_resuming(self, reason: str) -> list[Effect]:
        """Stops waiting for a repeated batch; a queue needs none, as its next number is proof."""
        self._unproven = None
        effects = [] if self._recovery is Recovery.QUEUED else self._hole(reason)
        self._settle()
        return effects

    # Replays

    def _ask(self, reason: str) -> list[Effect]:
        self.state, self.reason = FeedState.REPLAYING, reason
        return self._request()

    def _request(self) -> list[Effect]:
        self.replays += 1
        self.wants_retry = self._asks_everything = False
        self._asked_at, self._overtaken = self._next, None
        start = max(0, (self._next or 0) - 1)
        self._proof = self._stamps.get(start)
        self._unproven = None if self._proof is None else start
        return [RequestReplay(start)]

    def _restart(self, reason: str) -> list[Effect]:
        """The publisher restarted: requests everything, unless its replays are ignored."""
        self._forget_publisher()
        self._replay_trust.note_restart()
        self._incomplete = ""
        if not self._has_replays:
            self._settle()
            return [Forget()]
        return [Forget(), *self._ask(f"publisher restarted: {reason}")]

    def _overlap(self, batch: Batch) -> list[Effect]:
        """Handles a replayed batch that came before: it proves or disproves the publisher."""
        # since the request, live batches may have evicted the stamp of the proving batch
        is_proof = batch.sequence == self._unproven
        known = self._proof if is_proof else self._stamps.get(batch.sequence)
        if known is not None and known != batch.stamp:
            return self._restart(f"batch {batch.sequence} was replayed with different content")
        if known is not None:
            self._unproven = None
            if self._is_unproven:
                self.restoration = Restoration.PROVEN
        return []

    @property
    def _is_unproven(self) -> bool:
        return self.restoration is Restoration.UNPROVEN

    def _lose_restored(self) -> None:
        self._tries = 0
        if self._is_unproven:
            self.restoration = Restoration.LOST

    def _forget_restored(self) -> list[Effect]:
        """Forgets what was restored: the batch that proves it is not to be had any more."""
        self._lose_restored()
        self._next = self._unproven = None
        self._incomplete = ""
        self._stamps.clear()
        return [Forget()]

    def _start_over(self) -> list[Effect]:
        """Handles the first batch of a complete replay, which replaces the blocks held so far."""
        self._asks_everything = self.wants_everything = False
        self._overtaken, self._next = self._next, None
        self._incomplete = ""
        self._stamps.clear()
        self.state, self.reason = FeedState.REPLAYING, "replaying all batches again"
        return [Forget()]

    def _catch_up(self, why: str) -> list[Effect]:
        """Applies the batches held back during a replay."""
        self._settle()
        held = self._held_batches.take_all()
        effects: list[Effect] = []
        for position, batch in enumerate(held):
            if self._next is not None and batch.sequence > self._next:
                effects += self._lose(self._next, batch.sequence - 1, why)
                effects += self._take(batch)
                continue
            effects += self._live(batch)
            if self.state is FeedState.REPLAYING:  # it restarted again
                self._held_batches.extend(held[position + 1 :])
                break
        return effects

    # Common to both

    def _take(self, batch: Batch) -> list[Effect]:
        self._next = batch.sequence + 1
        self._stamps.note(batch.sequence, batch.stamp)
        effects: list[Effect]
        if batch.fault:
            effects = self._hole(f"batch {batch.sequence} could not be decoded: {batch.fault}")
        else:
            effects = [batch]
        if self._snapshot_last is not None and batch.sequence >= self._snapshot_last:
            self._snapshot_last = None
            self._is_snapshot_late = False
            self._settle()
        return effects

    def _forget_publisher(self) -> None:
        """Forgets a publisher that restarted: nothing that it stored is held any more."""
        self.restarts += 1
        self._next = None
        self._lose_restored()
        self._stamps.clear()
        self._drop_pending()

    def _drop_pending(self) -> None:
        """Ends a replay or resumption under way."""
        self._unproven = self._snapshot_last = None
        self._is_snapshot_late = False
        self._held_batches.clear()
        self._asks_everything = False

    def _lose(self, first: int, last: int, why: str) -> list[Effect]:
        return self._hole(f"batches {first} to {last} are lost: {why}")

    def _hole(self, reason: str) -> list[Effect]:
        self._incomplete = reason
        if self.state is not FeedState.REPLAYING:
            self._settle()
        return [Demote()]

    def _settle(self) -> None:
        """Sets the state: live if nothing is missing, degraded otherwise."""
        if self._is_snapshot_late:
            self.state, self.reason = FeedState.DEGRADED, SNAPSHOT_LATE
            return
        if self._asks and not self._has_replays:  # earlier events are not known
            self._incomplete = OTHER_PUBLISHER
        self.state = FeedState.DEGRADED if self._incomplete else FeedState.LIVE
        self.reason = self._incomplete
