"""What the process that follows the feeds passes on of each rank, as records.

A tap is a witness of one feed's effects (`kvstate.feeds.effects`): it writes down each when it is
complete, so that another process that repeats them holds what is held here. It writes nothing until
somebody reads the rank.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from kvstate.events import Batch, EngineLoad
from kvstate.feeds.feed import FeedState
from kvstate.index.core import Core
from kvstate.relay.records import NO_MARK, Kind, Mark, RelayedStatus, encoded, typed_payload


class TappedFeed(Protocol):
    """The feed's own state."""

    state: FeedState
    reason: str
    gaps: int
    replays: int
    restarts: int
    dropped: int
    wants_everything: bool

    @property
    def last_sequence(self) -> int | None:
        """Number of the last batch accepted, None before the first."""

    @property
    def incomplete(self) -> str:
        """Why something is missing, "" if nothing is."""


class Tapped(Protocol):
    """A rank that is followed here; `kvstate.feeds.subscriber.Subscriber` is one."""

    lag_seconds: float
    load: EngineLoad | None
    load_at: float

    @property
    def feed(self) -> TappedFeed:
        """Its feed."""

    @property
    def reason(self) -> str:
        """Why it is in its state."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Its counters."""

    @property
    def unapplied(self) -> int:
        """How many effects wait."""


class Tap:
    """The tap of one rank.

    number: in records. worker: its name. is_read: whether anybody reads it.
    is_heard: whether the tokens of its batches are needed.
    """

    def __init__(self, taps: "Taps", number: int, worker: str) -> None:
        self.number = number
        self.worker = worker
        self.is_read = False
        self.is_heard = False
        self._sequence, self._stamp = NO_MARK
        self._taps = taps
        self._tapped: Tapped  # both are set before anything happens to the rank
        self._owner: int
        self._last: tuple[bool, FeedState, str, float] | None = None
        self._is_due = False

    def watch(self, tapped: Tapped, owner: int) -> None:
        """Tells whose state it passes on. owner: its number in the core."""
        self._tapped = tapped
        self._owner = owner

    @property
    def mark(self) -> Mark:
        """Number and stamp of the last batch."""
        return Mark(self._sequence, self._stamp)

    def note_restored(self, number: int, stamp: float) -> None:
        """Notes that the rank begins as it was after a batch."""
        self._sequence, self._stamp = number, stamp

    def note_applied(self, batch: Batch) -> None:
        """Passes on a batch that was applied."""
        sequence, stamp = self._sequence, self._stamp = batch.sequence, batch.stamp
        if not self.is_read:
            return
        taps, body = self._taps, batch.body
        if not self.is_heard:
            length = taps.journal.pass_on(self._owner, self.number, sequence, stamp)
            if length:
                taps.note_length(length)
                return
        if isinstance(body, bytes):
            self._taps.put(encoded(Kind.BATCH, self.number, body, self.mark))
        else:
            self._taps.put(encoded(Kind.TYPED, self.number, typed_payload(body), self.mark))

    def note_forgotten(self) -> None:
        """Passes on that everything is forgotten from now on."""
        self._sequence, self._stamp = NO_MARK
        self._pass_on(Kind.FORGET)

    def note_demoted(self) -> None:
        """Passes on that everything is uncertain from now on."""
        self._pass_on(Kind.DEMOTE)

    def note_trust(self, *, trusted: bool) -> None:
        """Passes on the state of the feed if it has changed, and otherwise its counts, later."""
        if not self.is_read:
            return
        tapped = self._tapped
        last = trusted, tapped.feed.state, tapped.reason, tapped.load_at
        if last != self._last:
            self._last = last
            self._taps.put(encoded(Kind.STATUS, self.number, self.status()))
        elif not self._is_due:
            self._is_due = True
            self._taps.due.append(self)

    def refresh(self) -> None:
        """Passes on the counts, which have changed since they were last passed on."""
        self._is_due = False
        if self.is_read:
            self._taps.put(encoded(Kind.STATUS, self.number, self.status()))

    def status(self) -> bytes:
        """Returns the state of the feed, encoded."""
        tapped = self._tapped
        feed = tapped.feed
        trusted = self._last is not None and self._last[0]
        return msgspec.msgpack.encode(
            RelayedStatus(
                feed.state,
                tapped.reason,
                trusted,
                feed.last_sequence,
                feed.gaps,
                feed.replays,
                feed.restarts,
                feed.dropped,
                feed.incomplete,
                feed.wants_everything,
                tapped.lag_seconds,
                dict(tapped.counts),
                tapped.load,
                tapped.load_at,
                tapped.unapplied,
            )
        )

    def begin(self, *, trusted: bool) -> bytes:
        """Begins to be read; returns the present state of the feed, encoded."""
        self.is_read = True
        tapped = self._tapped
        self._last = trusted, tapped.feed.state, tapped.reason, tapped.load_at
        return self.status()

    def _pass_on(self, kind: Kind) -> None:
        if self.is_read:
            self._taps.put(encoded(kind, self.number, mark=self.mark))


class Taps:
    """The taps of all ranks that are followed here.

    journal: writes down changes; what it has precedes every record. due: those of which only counts
    have changed. put: takes a record; nobody reads until it is set. note_length: is called with the
    length of what the journal has. added, removed: are called when a rank is followed,
    and when a worker is not any more.
    """

    def __init__(self, journal: Core) -> None:
        self.journal = journal
        self.due: list[Tap] = []
        self.put: Callable[[bytes], None] = lambda _: None
        self.note_length: Callable[[int], None] = lambda _: None
        self.added: Callable[[], None] = lambda: None
        self.removed: Callable[[], None] = lambda: None
        self._taps: dict[str, list[Tap]] = {}
        self._heard: Counter[str] = Counter()
        self._free: list[int] = []
        self._numbers = 0

    def add(self, worker: str) -> Tap:
        """Returns the tap of a rank that is followed from now on."""
        if not self._free:
            self._free.append(self._numbers)
            self._numbers += 1
        tap = Tap(self, self._free.pop(), worker)
        tap.is_heard = worker in self._heard
        self._taps.setdefault(worker, []).append(tap)
        self.added()
        return tap

    def of(self, worker: str) -> list[Tap] | None:
        """Returns a worker's taps, the same list while it is followed; None if it is not."""
        return self._taps.get(worker)

    def remove(self, worker: str) -> None:
        """Notes that a worker's ranks are not followed any more."""
        for tap in self._taps.pop(worker, ()):
            if tap.is_read:
                self.put(encoded(Kind.GONE, tap.number))
            tap.is_read = False
            self._free.append(tap.number)
        self.removed()

    def hear(self, worker: str, *, more: int) -> None:
        """Notes that so many more processes, or fewer, need the tokens of a worker's batches."""
        self._heard[worker] += more
        if not self._heard[worker]:
            del self._heard[worker]
        for tap in self._taps.get(worker, ()):
            tap.is_heard = worker in self._heard

    def refresh(self) -> None:
        """Passes on the counts that have changed since the last time."""
        due, self.due = self.due, []
        for tap in due:
            tap.refresh()

    def stop(self) -> None:
        """Notes that nobody reads any more."""
        for taps in self._taps.values():
            for tap in taps:
                tap.is_read = False
