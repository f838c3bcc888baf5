"""The state machine of one rank's event feed: what can be concluded from its sequence numbers.

It knows sequence numbers and stamps (the publisher's time stamps), never blocks. The caller reports
what happens through its methods, which return what to do as effects, in order.

    state        means                                                      credits are
    connecting   no connection was made yet                                 none
    replaying    catching up with what was missed                           uncertain
    live         nothing is missing since the first batch that was asked    certain
    degraded     something is missing and could not be had: a hole          certain since the hole
    stale        the connection is lost                                     uncertain
    unsupported  the worker publishes no events                             none

Effects: apply a batch; `Demote`, a hole: stored blocks become uncertain; `Forget`, nothing is held
any more; `Replay`, request batches again.

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
    silence                      replay from n - 1, once, then   a hole where it resumes; a queue
                                 seldom: a last one may be lost  may have nothing to say
    restarts in a row            replays contradict the live     -
                                 stream: none until reconnection
    snapshot                     forget; what follows is all     forget; what follows is all
    lost, or it cannot be made   drop what is pending            drop what is pending
    refused                      forget                          forget
    failed, on our side          a hole, and as lost             a hole, and as lost
    missed within a batch        degraded until healed           degraded until healed
    healed                       nothing earlier matters         nothing earlier matters

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
    ask_everything  .     .     .     .     .     .
    snapshot        R     .     R     R     R     R
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

from collections import OrderedDict, deque
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from kvstate.events import Batch
from kvstate.feeds.feed_sources import Recovery

# Stamps kept to distinguish a duplicate from a restarted publisher. Duplicates come from a replay
# that overtakes the live stream, so they are at most as old as the replay.
MAX_STAMPS = 4096

# Live batches held back while a replay runs. If one does not fit, the oldest is dropped: the gap is
# then before the held batches, and is requested at the end of the replay.
MAX_HELD_BATCHES = 4096
MAX_HELD_BYTES = 64 * 1024 * 1024

# Restarts over one connection, without a replay that contains the batches received live, after
# which replays are ignored.
MAX_RESTARTS_IN_A_ROW = 3
# The last batches of the live stream; replays are compared with them.
MAX_HEARD = 64


class State(StrEnum):
    """The state of a feed; the module's table says what credits it allows."""

    CONNECTING = "connecting"
    REPLAYING = "replaying"
    LIVE = "live"
    DEGRADED = "degraded"
    STALE = "stale"
    UNSUPPORTED = "unsupported"


class Forget(msgspec.Struct, frozen=True):
    """Everything stored so far is gone: the publisher restarted."""


class Demote(msgspec.Struct, frozen=True):
    """Everything stored so far is uncertain: there is a hole."""


class Replay(msgspec.Struct, frozen=True):
    """Request the publisher's batches from this number on; replaces a replay under way."""

    start: int


# A batch to apply.
Effect = Batch | Forget | Demote | Replay

# Why the first batch received was not the publisher's first.
NOTHING_YET = "nothing was received yet: blocks stored before this connection are unknown"
NO_REPLAY = "no replay endpoint: blocks stored before this connection are unknown"
OTHER_PUBLISHER = (
    "its replays contradict what it publishes: is `replay` the endpoint of another worker?"
)
# Why missed batches cannot be recovered; with replays, why they are ignored.
_NOT_TO_BE_HAD = {
    Recovery.NONE: "no replay endpoint",
    Recovery.REPLAY: OTHER_PUBLISHER,
    Recovery.RESUME: "the publisher skipped them",
    Recovery.QUEUED: "another consumer drains this worker, or its event buffer overflowed",
}

# A batch that arrives without a connection is a remnant of the last one.
_WITHOUT_CONNECTION = (State.CONNECTING, State.STALE, State.UNSUPPORTED)


class Held:
    """Live batches that are held back while a replay runs, in order and bounded."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()
        self._bytes = 0

    @property
    def first_sequence(self) -> int | None:
        """Number of the oldest one."""
        return self._batches[0].sequence if self._batches else None

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, batch: Batch) -> None:
        """Adds a batch and drops the oldest beyond the limits; the newest always stays."""
        self._batches.append(batch)
        self._bytes += batch.size_bytes
        while len(self._batches) > 1 and self._is_over_limit():
            self._bytes -= self._batches.popleft().size_bytes

    def extend(self, batches: Iterable[Batch]) -> None:
        """Adds several."""
        for batch in batches:
            self.append(batch)

    def take_all(self) -> list[Batch]:
        """Returns all of them, oldest first, and keeps none."""
        taken = list(self._batches)
        self.clear()
        return taken

    def clear(self) -> None:
        """Drops all of them."""
        self._batches.clear()
        self._bytes = 0

    def _is_over_limit(self) -> bool:
        return len(self._batches) > MAX_HELD_BATCHES or self._bytes > MAX_HELD_BYTES


class Feed:
    """One rank's feed, not connected yet.

    recovery: how missed batches are recovered. wants_everything: a replay failed, and a complete
    one may repair this.
    """

    def __init__(self, recovery: Recovery) -> None:
        self.state = State.CONNECTING
        self.reason = "not connected yet"
        self.gaps = 0
        self.restarts = 0
        self.replays = 0
        self.wants_everything = False
        self._recovery = recovery
        self._asks = recovery is Recovery.REPLAY
        self._next: int | None = None
        self._stamps: OrderedDict[int, float] = OrderedDict()
        self._incomplete = ""
        self._unproven: int | None = None  # this batch, repeated, proves the publisher
        self._snapshot_last: int | None = None
        # only for publishers with replays
        self._held: Held = Held()
        self._asked_at: int | None = None
        self._overtaken: int | None = None  # the number expected before a replay started over
        self._proof: float | None = None  # the stamp of the batch that proves the publisher
        self._asks_everything = False
        self._heard = False
        self._heard_stamps: OrderedDict[int, float] = OrderedDict()
        self._restarts_in_a_row = 0
        self._was_answered = False  # since the last restart

    @property
    def last_sequence(self) -> int | None:
        """Number of the last batch accepted, None before the first."""
        return self._next - 1 if self._next else None

    @property
    def certain(self) -> bool:
        """Whether blocks stored since the last hole are certain now."""
        return self.state is State.LIVE or self.state is State.DEGRADED

    @property
    def _has_replays(self) -> bool:
        """Whether the publisher has replays that can be trusted."""
        return self._asks and self._restarts_in_a_row < MAX_RESTARTS_IN_A_ROW

    def connected(self) -> list[Effect]:
        """Notes that the subscription is in place, for the first time or again."""
        if self._asks:
            self._heard = True  # it may take effect only after the replay and one more batch
            self._heard_stamps.clear()
            self.wants_everything |= not self._has_replays  # replays may be this publisher's now
            self._restarts_in_a_row, self._was_answered = 0, False
            return self._ask("connected")
        is_without = self._recovery is Recovery.NONE
        if self._next is None:
            self._incomplete = NO_REPLAY if is_without else NOTHING_YET
            self._settle()
        elif is_without:
            return self._hole("the connection was lost and there is no replay endpoint")
        else:
            self._unproven = self._next - 1
            self.state, self.reason = State.REPLAYING, f"resuming after batch {self._unproven}"
        return []

    def disconnected(self, reason: str = "connection lost") -> list[Effect]:
        """Handles a connection that is lost or cannot be made; events sent meanwhile are missed."""
        self.reason = reason
        if self.state is not State.CONNECTING:  # else there never was one
            self.state = State.STALE
        self._drop_pending()
        return []

    def failed(self, reason: str) -> list[Effect]:
        """Notes an error on this side: the last batches may not have been applied.

        It is treated as a lost connection; the caller calls `connected` to try again.
        """
        self.disconnected(reason)
        self._incomplete = reason
        self.wants_everything = self._asks
        return [Demote()]

    def refused(self, reason: str) -> list[Effect]:
        """Handles the publisher's report that it has no events; its earlier ones are forgotten."""
        self.state, self.reason = State.UNSUPPORTED, reason
        self._drop_pending()
        self._next = None
        self._stamps.clear()
        return [Forget()]

    def received(self, batch: Batch) -> list[Effect]:
        """Handles a batch of the live stream, or a remnant of the last connection."""
        if self.state in _WITHOUT_CONNECTION:
            return []
        if self._asks:
            self._heard = True
            self._note_heard(batch)
            if self.state is State.REPLAYING:
                self._held.append(batch)
                return []
        elif self._unproven is not None:
            return self._resumed(batch, self._unproven)
        return self._live(batch)

    def replayed(self, batch: Batch) -> list[Effect]:
        """Handles a batch of the requested replay."""
        if not self._has_replays or self.state in _WITHOUT_CONNECTION:
            return []
        self._was_answered = True
        if self._heard_stamps.get(batch.sequence) == batch.stamp:
            self._restarts_in_a_row = 0
        effects: list[Effect] = []
        if self._asks_everything:
            effects += self._start_over()
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

    def replay_ended(self) -> list[Effect]:
        """Notes that the replay is complete."""
        if not self._has_replays or self.state in _WITHOUT_CONNECTION:
            return []
        self._was_answered = True
        if self._unproven is not None or self._asks_everything:
            return self._restart("the publisher counts from 0 again")
        if self._next is None and not self._held:
            self._next = 0
        first = self._overtaken if self._held.first_sequence is None else self._held.first_sequence
        if first is not None and self._next != self._asked_at and first > (self._next or 0):
            return self._ask("more was missed meanwhile")
        return self._catch_up("missing in the replay")

    def replay_failed(self, reason: str) -> list[Effect]:
        """Notes that the replay failed or broke off, for this reason."""
        self._asks_everything = False
        if not self._asks or self.state is not State.REPLAYING:
            return []  # nothing is repaired or proven by it
        self.wants_everything = True
        failed = f"replay failed: {reason}"
        if self._next is not None:
            return [*self._hole(failed), *self._catch_up(failed)]
        self._incomplete = f"{failed}; earlier blocks are unknown"
        return self._catch_up(failed)

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
        return [Replay(0)]

    def snapshot(self, first: int, last: int, unknown_before: int) -> list[Effect]:
        """Notes that a snapshot of all the publisher has follows: batches `first` to `last`."""
        self._drop_pending()
        self._stamps.clear()
        self._next, self._snapshot_last = first, last
        self._incomplete = f"{unknown_before} batches were never received" if unknown_before else ""
        self.state, self.reason = State.REPLAYING, f"snapshot of batch {last}"
        return [Forget()]

    def healed(self) -> None:
        """Forgets earlier holes: nothing uncertain is left, or the cache was emptied."""
        self._incomplete = ""
        self.wants_everything = False
        if self.state is State.DEGRADED:
            self._settle()

    def miss(self, reason: str) -> None:
        """Notes that a part of a batch is not known, for a reason other than its number."""
        self._incomplete = reason
        if self.state is State.LIVE:
            self._settle()

    def quiet(self, *, for_long: bool = False) -> list[Effect]:
        """Handles silence: no batch for a while, or (for_long) for another long while.

        Requests a replay to check whether the last batch was lost, once and then seldom; or stops
        waiting for the batch that proves that none was.
        """
        if self._asks:
            heard, self._heard = self._heard, False
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
            why = _NOT_TO_BE_HAD[self._recovery]
            return self._lose(expected, batch.sequence - 1, why) + self._take(batch)
        self._held.append(batch)
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
        known = self._stamps.get(batch.sequence)
        latest = self._stamps.get(expected - 1, batch.stamp)
        if known == batch.stamp or (known is None and batch.stamp < latest):
            return []
        reason = f"batch {batch.sequence} came again with different content"
        if not self._asks:
            self._forget_publisher()
            self._incomplete = f"publisher restarted: {reason}; its first batches were missed"
            self._settle()
            return [Forget(), *self._first(batch)]
        effects = self._restart(reason)
        self._note_heard(batch)
        if not self._has_replays:
            return effects + self._first(batch)
        self._held.append(batch)
        return effects

    def _resumed(self, batch: Batch, unproven: int) -> list[Effect]:
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
        self.state, self.reason = State.REPLAYING, reason
        return self._request()

    def _request(self) -> list[Effect]:
        self.replays += 1
        self._asks_everything = False
        self._asked_at, self._overtaken = self._next, None
        start = max(0, (self._next or 0) - 1)
        self._proof = self._stamps.get(start)
        self._unproven = None if self._proof is None else start
        return [Replay(start)]

    def _restart(self, reason: str) -> list[Effect]:
        """The publisher restarted: requests everything, unless its replays are ignored."""
        self._forget_publisher()
        self._heard_stamps.clear()
        self._incomplete = ""
        self._restarts_in_a_row += self._was_answered
        self._was_answered = False
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
        return []

    def _start_over(self) -> list[Effect]:
        """Handles the first batch of a complete replay, which replaces the blocks held so far."""
        self._asks_everything = self.wants_everything = False
        self._overtaken, self._next = self._next, None
        self._incomplete = ""
        self._stamps.clear()
        self.state, self.reason = State.REPLAYING, "replaying all batches again"
        return [Forget()]

    def _catch_up(self, why: str) -> list[Effect]:
        """Applies the batches held back during a replay."""
        self._settle()
        held = self._held.take_all()
        effects: list[Effect] = []
        for position, batch in enumerate(held):
            if self._next is not None and batch.sequence > self._next:
                effects += self._lose(self._next, batch.sequence - 1, why)
                effects += self._take(batch)
                continue
            effects += self._live(batch)
            if self.state is State.REPLAYING:  # it restarted again
                self._held.extend(held[position + 1 :])
                break
        return effects

    def _note_heard(self, batch: Batch) -> None:
        self._heard_stamps[batch.sequence] = batch.stamp
        if len(self._heard_stamps) > MAX_HEARD:
            self._heard_stamps.popitem(last=False)

    # Common to both

    def _take(self, batch: Batch) -> list[Effect]:
        self._next = batch.sequence + 1
        self._stamps[batch.sequence] = batch.stamp
        if len(self._stamps) > MAX_STAMPS:
            self._stamps.popitem(last=False)
        effects: list[Effect]
        if batch.fault:
            effects = self._hole(f"batch {batch.sequence} could not be decoded: {batch.fault}")
        else:
            effects = [batch]
        if self._snapshot_last is not None and batch.sequence >= self._snapshot_last:
            self._snapshot_last = None
            self._settle()
        return effects

    def _forget_publisher(self) -> None:
        """Forgets a publisher that restarted: nothing that it stored is held any more."""
        self.restarts += 1
        self._next = None
        self._stamps.clear()
        self._drop_pending()

    def _drop_pending(self) -> None:
        """Ends a replay or resumption under way."""
        self._unproven = self._snapshot_last = None
        self._held.clear()
        self._asks_everything = False

    def _lose(self, first: int, last: int, why: str) -> list[Effect]:
        return self._hole(f"batches {first} to {last} are lost: {why}")

    def _hole(self, reason: str) -> list[Effect]:
        self._incomplete = reason
        if self.state is not State.REPLAYING:
            self._settle()
        return [Demote()]

    def _settle(self) -> None:
        """Sets the state: live if nothing is missing, degraded otherwise."""
        if self._asks and not self._has_replays:  # earlier events are not known
            self._incomplete = OTHER_PUBLISHER
        self.state = State.DEGRADED if self._incomplete else State.LIVE
        self.reason = self._incomplete
