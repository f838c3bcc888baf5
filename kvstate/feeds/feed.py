"""The state machine of one rank's event feed: what its sequence numbers allow us to believe.

All transitions are here. It knows sequence numbers and stamps (the publisher's time stamps), never
blocks; it is told what happened and returns what to do, as effects, in order.

    state        means                                                      credits are
    connecting   no connection was made yet                                 none
    replaying    catching up with what was missed                           uncertain
    live         nothing is missing since the first batch that was asked    certain
    degraded     something is missing and could not be had: a hole          certain since the hole
    stale        the connection is lost                                     uncertain
    unsupported  the worker publishes no events                             none

Rules, in the order in which they are tried (n is the number expected next):

    live batch n                 apply
    live batch > n               hold it; ask for a replay from n - 1, or it is a hole
    live batch < n, known stamp  a duplicate: drop
    live batch < n, other stamp  the publisher restarted: forget everything, replay from 0
    replayed batch n             apply; unless one with a known stamp came before it, behind a hole
    replayed batch > n           the publisher's buffer no longer has n: a hole
    replayed batch < n, other    the publisher restarted: forget everything, replay from 0
    replay ends before n - 1     the publisher counts from 0 again: it restarted, likewise
    replay ends short of a held  ask on from there if it brought anything
    replay ends or fails         what is held and does not follow n is behind a hole
    replay failed, later         ask for everything again; its first answer replaces what is held
    undecodable batch            a hole of one batch
    reconnected                  as a gap whose size is not known
    snapshot                     forget everything; the batches that follow hold all there is
    silence                      ask once from n - 1, then seldom: a last batch may be lost
    refused                      the worker publishes nothing
    failed                       an error of our own: a hole, and as a connection that is lost

How what was missed can be had differs (`Recovery`). A replay starts at n - 1 and not at n so that
its first batch proves that the publisher is still the same one: vLLM and SGLang send nothing when
they start or stop. A connection that resumes is asked for n - 1 too and proves it in the same way.
A queue never repeats: n proves that nothing was lost on the way, and a restarted one begins with
an event of its own. Where there is no such proof, every gap, restart or reconnection is a hole at
once.
"""

from collections import OrderedDict
from typing import Generic

from kvstate.feeds.feed_terms import (
    Apply,
    Body,
    Demote,
    Effect,
    Forget,
    Numbered,
    Recovery,
    Replay,
    State,
)
from kvstate.feeds.held import Held

__all__ = [
    "Apply",
    "Demote",
    "Effect",
    "Feed",
    "Forget",
    "Numbered",
    "Recovery",
    "Replay",
    "State",
]

# Stamps remembered to tell a duplicate from a restarted publisher. Duplicates come from a replay
# that overtakes the live stream, so they are at most a replay's duration old.
MAX_STAMPS = 4096

_NO_REPLAY = "no replay endpoint: blocks stored before this connection are unknown"
_NOTHING_YET = "nothing was received yet: blocks stored before this connection are unknown"
_NOT_TO_BE_HAD = {
    Recovery.NONE: "no replay endpoint",
    Recovery.REPLAY: "the replay does not have them",
    Recovery.RESUME: "the publisher skipped them",
    Recovery.QUEUED: "another consumer drains this worker, or its event buffer overflowed",
}


class Feed(Generic[Body]):
    """One rank's feed."""

    def __init__(self, recovery: Recovery) -> None:
        self.state = State.CONNECTING
        self.reason = "not connected yet"
        self.gaps = 0
        self.restarts = 0
        self.replays = 0
        self.wants_everything = False  # a replay failed: another one may mend it
        self._recovery = recovery
        self._next: int | None = None
        self._held: Held[Body] = Held()
        self._stamps: OrderedDict[int, float] = OrderedDict()
        self._incomplete = ""
        self._asked_at: int | None = None
        self._overtaken: int | None = None  # where the live stream was when it was started over
        self._unproven: int | None = None
        self._heard = False
        self._snapshot_last: int | None = None
        self._asks_everything = False

    @property
    def last_sequence(self) -> int | None:
        """Number of the last batch that was taken, None before the first."""
        return self._next - 1 if self._next else None

    @property
    def certain(self) -> bool:
        """Whether what was stored since the last hole can be believed now."""
        return self.state in (State.LIVE, State.DEGRADED)

    def connected(self) -> list[Effect[Body]]:
        """The subscription is in place, for the first time or again."""
        self._heard = True  # it may reach the publisher after the replay and one batch more
        if self._recovery is Recovery.REPLAY:
            return self._ask("connected")
        if self._next is None:
            is_without = self._recovery is Recovery.NONE
            self._incomplete = _NO_REPLAY if is_without else _NOTHING_YET
        elif self._recovery is Recovery.NONE:
            return self._hole("the connection was lost and there is no replay endpoint")
        else:
            self._unproven = self._next - 1
            self.state, self.reason = State.REPLAYING, f"resuming after batch {self._unproven}"
            return []
        self._settle()
        return []

    def disconnected(self, reason: str = "connection lost") -> list[Effect[Body]]:
        """The connection is lost; what happens meanwhile is not seen."""
        self.state, self.reason = State.STALE, reason
        self._drop_pending()
        return []

    def failed(self, reason: str) -> list[Effect[Body]]:
        """Something went wrong on this side: what came last may not have been taken.

        As a lost connection; `connected` is to follow once it may be tried again.
        """
        self.disconnected(reason)
        self._incomplete = reason
        self.wants_everything = self._recovery is Recovery.REPLAY
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
        if self.state in (State.CONNECTING, State.STALE, State.UNSUPPORTED):
            return []
        self._heard = True
        if self.state is State.REPLAYING and self._recovery is Recovery.REPLAY:
            self._held.append(batch)
            return []
        if self._unproven is not None and self._recovery is not Recovery.REPLAY:
            return self._resumed(batch, self._unproven)
        return self._live(batch)

    def replayed(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        """A batch of the replay that was asked for."""
        effects: list[Effect[Body]] = []
        if self._asks_everything:
            effects += self._start_over()
        expected = self._next
        if expected is not None and batch.sequence < expected:
            return self._overlap(batch)
        if expected is None:
            if batch.sequence > 0:
                self._incomplete = f"batches before {batch.sequence} are no longer to be had"
        elif batch.sequence > expected:
            effects += self._lose(
                expected, batch.sequence - 1, "no longer in the publisher's buffer"
            )
        elif self._unproven is not None:
            effects += self._hole(f"batch {self._unproven} is gone: no proof of the same publisher")
        self._unproven = None
        return effects + self._take(batch)

    def replay_ended(self) -> list[Effect[Body]]:
        """The replay is complete."""
        if self._unproven is not None or self._asks_everything:
            return self._restart("the publisher counts from 0 again")
        if self._next is None and not self._held:
            self._next = 0
        first = self._overtaken if self._held.first_sequence is None else self._held.first_sequence
        if first is not None and self._next != self._asked_at and first > (self._next or 0):
            return self._ask("more was missed meanwhile")
        return self._catch_up("missing in the replay")

    def replay_failed(self, reason: str) -> list[Effect[Body]]:
        """The replay was not answered, or broke off."""
        self._asks_everything = False
        if self.state is not State.REPLAYING:
            return []  # what it was to mend or to prove is as it was
        self.wants_everything = True
        if self._next is not None:
            return [*self._hole(f"replay failed: {reason}"), *self._catch_up(reason)]
        self._incomplete = f"replay failed: {reason}; earlier blocks are unknown"
        return self._catch_up(reason)

    def ask_everything(self) -> list[Effect[Body]]:
        """Some time after a replay failed: ask for all that the publisher still has.

        What is held now is kept and followed until the first answer comes.
        """
        if not (self.wants_everything and self.certain) or self._asks_everything:
            return []
        self._asks_everything = True
        self.replays += 1
        self._unproven = None
        self._asked_at = None
        return [Replay(0)]

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

    def quiet(self, *, for_long: bool = False) -> list[Effect[Body]]:
        """Nothing came for a while: ask, once, whether a last batch was lost; and now and then."""
        if self.state is State.REPLAYING and self._recovery is not Recovery.REPLAY:
            if self._unproven is None or self._recovery is Recovery.QUEUED:
                return []  # a snapshot under way, or a queue that may have lost its last events
            return self._end_resuming(f"batch {self._unproven} did not come again: no proof")
        heard, self._heard = self._heard, False
        can_ask = self._recovery is Recovery.REPLAY and self.certain and not self._asks_everything
        return self._request() if can_ask and (heard or for_long) else []

    def _live(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        expected = self._next
        if expected is None:
            return self._first(batch)
        if batch.sequence == expected:
            return self._take(batch)
        if batch.sequence < expected:
            return self._regress(batch, expected)
        self.gaps += 1
        if self._recovery is Recovery.REPLAY:
            self._held.append(batch)
            return self._ask(f"batches {expected} to {batch.sequence - 1} were missed")
        why = _NOT_TO_BE_HAD[self._recovery]
        return self._lose(expected, batch.sequence - 1, why) + self._take(batch)

    def _first(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        if batch.sequence == 0:
            self._incomplete = ""
        elif self._incomplete in ("", _NOTHING_YET):
            self._incomplete = f"batches before {batch.sequence} are unknown"
        effects = self._take(batch)
        self._settle()
        return effects

    def _resumed(self, batch: Numbered[Body], unproven: int) -> list[Effect[Body]]:
        """A batch of a new connection that has not proven yet to be of the same publisher."""
        if batch.sequence <= unproven:
            if self._stamps.get(batch.sequence) != batch.stamp:
                return self._regress(batch, unproven + 1)
            self._unproven = None
            self._settle()
            return []
        lost = self._end_resuming(f"batch {unproven} is gone: no proof of the same publisher")
        return lost + self._live(batch)

    def _end_resuming(self, reason: str) -> list[Effect[Body]]:
        """No batch came again. Only a queue needs none: its next number proves it."""
        self._unproven = None
        effects = [] if self._recovery is Recovery.QUEUED else self._hole(reason)
        self._settle()
        return effects

    def _regress(self, batch: Numbered[Body], expected: int) -> list[Effect[Body]]:
        """A number that was taken before: a duplicate, or a publisher that counts from 0 again."""
        known = self._stamps.get(batch.sequence)
        latest = self._stamps.get(expected - 1, batch.stamp)
        if known == batch.stamp or (known is None and batch.stamp < latest):
            return []
        effects = self._restart(f"batch {batch.sequence} came again with other contents")
        if self._recovery is Recovery.REPLAY:
            self._held.append(batch)
            return effects
        return effects + self._first(batch)

    def _overlap(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        known = self._stamps.get(batch.sequence)
        if known is not None and known != batch.stamp:
            return self._restart(f"batch {batch.sequence} was replayed with other contents")
        if known is not None:
            self._unproven = None
        return []

    def _take(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        self._next = batch.sequence + 1
        self._stamps[batch.sequence] = batch.stamp
        if len(self._stamps) > MAX_STAMPS:
            self._stamps.popitem(last=False)
        effects: list[Effect[Body]] = []
        if batch.body is None:
            effects += self._hole(f"batch {batch.sequence} could not be decoded")
        else:
            effects.append(Apply(batch.body))
        if self._snapshot_last is not None and batch.sequence >= self._snapshot_last:
            self._snapshot_last = None
            self._settle()
        return effects

    def _ask(self, reason: str) -> list[Effect[Body]]:
        self.state, self.reason = State.REPLAYING, reason
        return self._request()

    def _request(self) -> list[Effect[Body]]:
        self.replays += 1
        self._asks_everything = False
        self._asked_at, self._overtaken = self._next, None
        start = max(0, (self._next or 0) - 1)
        self._unproven = start if start in self._stamps else None
        return [Replay(start)]

    def _start_over(self) -> list[Effect[Body]]:
        """The first answer to the question for everything: it replaces what was held."""
        self._asks_everything = self.wants_everything = False
        self._overtaken, self._next = self._next, None
        self._incomplete = ""
        self._stamps.clear()
        self.state, self.reason = State.REPLAYING, "catching up with all batches again"
        return [Forget()]

    def _restart(self, reason: str) -> list[Effect[Body]]:
        self.restarts += 1
        self._next = None
        self._stamps.clear()
        self._drop_pending()
        if self._recovery is Recovery.REPLAY:
            self._incomplete = ""
            return [Forget(), *self._ask(f"publisher restarted: {reason}")]
        self._incomplete = f"publisher restarted: {reason}; its first batches were not seen"
        self._settle()
        return [Forget()]

    def _drop_pending(self) -> None:
        """Ends what was under way."""
        self._held.clear()
        self._unproven = self._snapshot_last = None
        self._asks_everything = False

    def _catch_up(self, why: str) -> list[Effect[Body]]:
        """Takes what was held back during a replay."""
        self._settle()
        held = self._held.take_all()
        effects: list[Effect[Body]] = []
        for position, batch in enumerate(held):
            if self._next is not None and batch.sequence > self._next:
                effects += self._lose(self._next, batch.sequence - 1, why)
                effects += self._take(batch)
                continue
            effects += self._live(batch)
            if self.state is State.REPLAYING:  # it restarted once more
                self._held.extend(held[position + 1 :])
                break
        return effects

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
