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
    undecodable batch            a hole of one batch
    reconnected                  as a gap whose size is not known
    silence                      ask once from n - 1: a last batch may be lost

A replay starts at n - 1 and not at n so that its first batch proves that the publisher is still the
same one: vLLM and SGLang send nothing when they start or stop. Without a replay endpoint there is
no such proof, and every gap, restart or reconnection is a hole at once.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Body = TypeVar("Body")


class State(StrEnum):
    """See the table above."""

    CONNECTING = "connecting"
    REPLAYING = "replaying"
    LIVE = "live"
    DEGRADED = "degraded"
    STALE = "stale"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Numbered(Generic[Body]):
    """A batch as the feed sees it: its number, its stamp, and a body that is none of its business.

    body is None where the payload could not be decoded.
    """

    sequence: int
    stamp: float
    body: Body | None


@dataclass(frozen=True, slots=True)
class Apply(Generic[Body]):
    """Apply this body to the index."""

    body: Body


@dataclass(frozen=True, slots=True)
class Forget:
    """Everything stored so far is gone: the publisher restarted."""


@dataclass(frozen=True, slots=True)
class Demote:
    """Everything stored so far is uncertain: there is a hole."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask the publisher for its batches from this number on; it replaces a replay under way."""

    start: int


Effect = Apply[Body] | Forget | Demote | Replay

# Live batches kept back while a replay runs. Where one does not fit, the oldest is dropped: the gap
# then lies before what is held, and the end of the replay asks for it.
MAX_HELD_BATCHES = 4096

# Stamps remembered to tell a duplicate from a restarted publisher. Duplicates come from a replay
# that overtakes the live stream, so they are at most a replay's duration old.
MAX_STAMPS = 4096


class Feed(Generic[Body]):
    """One rank's feed.

    can_replay: whether the publisher has a replay endpoint.
    """

    def __init__(self, *, can_replay: bool) -> None:
        self.state = State.CONNECTING
        self.reason = "not connected yet"
        self.gaps = 0
        self.restarts = 0
        self.replays = 0
        self._can_replay = can_replay
        self._next: int | None = None
        self._held: deque[Numbered[Body]] = deque(maxlen=MAX_HELD_BATCHES)
        self._stamps: OrderedDict[int, float] = OrderedDict()
        self._incomplete = ""
        self._asked_at: int | None = None
        self._unproven: int | None = None

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
        if self._can_replay:
            return self._ask("connected")
        if self._next is None:
            self._incomplete = (
                "no replay endpoint: blocks stored before this connection are unknown"
            )
            self._settle()
            return []
        return self._hole("the connection was lost and there is no replay endpoint")

    def disconnected(self, reason: str = "connection lost") -> list[Effect[Body]]:
        """The connection is lost; what happens meanwhile is not seen."""
        self.state, self.reason = State.STALE, reason
        self._held.clear()
        return []

    def received(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        """A batch of the live stream; while there is no connection, a remnant of the last one."""
        if self.state in (State.CONNECTING, State.STALE):
            return []
        if self.state is State.REPLAYING:
            self._held.append(batch)
            return []
        return self._live(batch)

    def replayed(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        """A batch of the replay that was asked for."""
        expected = self._next
        if expected is not None and batch.sequence < expected:
            return self._overlap(batch)
        effects: list[Effect[Body]] = []
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
        if self._unproven is not None:
            return self._restart("the publisher counts from 0 again")
        if self._next is None and not self._held:
            self._next = 0
        if (
            self._held
            and self._next != self._asked_at
            and self._held[0].sequence > (self._next or 0)
        ):
            return self._ask("more was missed meanwhile")
        return self._catch_up("missing in the replay")

    def replay_failed(self, reason: str) -> list[Effect[Body]]:
        """The replay was not answered, or broke off."""
        if self.state is not State.REPLAYING:
            return []  # it was a probe
        if self._next is not None:
            return [*self._hole(f"replay failed: {reason}"), *self._catch_up(reason)]
        self._incomplete = f"replay failed: {reason}; earlier blocks are unknown"
        return self._catch_up(reason)

    def healed(self) -> None:
        """Nothing uncertain is left, or the cache was emptied: nothing earlier matters any more."""
        self._incomplete = ""
        if self.state is State.DEGRADED:
            self._settle()

    def miss(self, reason: str) -> None:
        """What a batch said is not all known, for a reason that its number does not show."""
        self._incomplete = reason
        if self.state is State.LIVE:
            self._settle()

    def probe(self) -> list[Effect[Body]]:
        """Nothing came for a while: ask whether a last batch was lost."""
        if self._can_replay and self.certain and self._next is not None:
            return self._request()
        return []

    def _live(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        expected = self._next
        if expected is None:
            return self._first(batch)
        if batch.sequence == expected:
            return self._take(batch)
        if batch.sequence < expected:
            return self._regress(batch, expected)
        self.gaps += 1
        if self._can_replay:
            self._held.append(batch)
            return self._ask(f"batches {expected} to {batch.sequence - 1} were missed")
        lost = self._lose(expected, batch.sequence - 1, "no replay endpoint")
        return lost + self._take(batch)

    def _first(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        if batch.sequence == 0:
            self._incomplete = ""
        elif not self._incomplete:
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
        effects = self._restart(f"batch {batch.sequence} came again with other contents")
        if self._can_replay:
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
        if batch.body is None:
            return self._hole(f"batch {batch.sequence} could not be decoded")
        return [Apply(batch.body)]

    def _ask(self, reason: str) -> list[Effect[Body]]:
        self.state, self.reason = State.REPLAYING, reason
        return self._request()

    def _request(self) -> list[Effect[Body]]:
        self.replays += 1
        self._asked_at = self._next
        start = max(0, (self._next or 0) - 1)
        self._unproven = start if start in self._stamps else None
        return [Replay(start)]

    def _restart(self, reason: str) -> list[Effect[Body]]:
        self.restarts += 1
        self._next = None
        self._unproven = None
        self._stamps.clear()
        self._held.clear()
        self._incomplete = "" if self._can_replay else f"{reason}; no replay endpoint"
        if not self._can_replay:
            self._settle()
            return [Forget()]
        return [Forget(), *self._ask(f"publisher restarted: {reason}")]

    def _catch_up(self, why: str) -> list[Effect[Body]]:
        """Takes what was held back during a replay."""
        self._settle()
        held = list(self._held)
        self._held.clear()
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
