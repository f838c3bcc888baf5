"""Where a subscriber puts what its feed may believe."""

import logging
from collections import Counter
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

import msgspec

from kvstate.errors import WireError
from kvstate.events import EventBatch
from kvstate.feeds.feed import Feed, State
from kvstate.index import Index, Owner

log = logging.getLogger("kvsteer.feed")

# A batch as a transport gives it: a msgpack payload, or events decoded already.
Body = bytes | EventBatch

# Larger batches are shown to no listener, who takes each in one go.
MAX_SHOWN_BYTES = 128 * 1024
MAX_SHOWN_EVENTS = 1_024

# What was left out because it would have taken too much memory.
_HUGE = frozenset({"huge_hash", "huge_extra_keys"})

# Is shown the batches of a rank.
Listener = Callable[[Body], None]


class Taken(msgspec.Struct, frozen=True):
    """What became of a batch.

    healed: nothing uncertain is left since. missed: why not all that it said is known, "" if it is.
    faults: names of what was skipped, one each.
    """

    healed: bool = False
    missed: str = ""
    faults: tuple[str, ...] = ()


class Sink(Protocol):
    """What follows one rank's feed: the index, or a bridge's mirror of the worker.

    What may take long is done in steps, each of which is short; what is not done when they end
    early stays undone.
    """

    def applying(self, body: Body) -> Generator[None, None, Taken]:
        """Takes one batch.

        Raises:
            WireError: it is no event batch; nothing has happened.
        """

    def forgetting(self) -> Generator[None, None, None]:
        """The publisher restarted: nothing is held any more."""

    def demoting(self) -> Generator[None, None, None]:
        """There is a hole: what is held is uncertain."""

    def trust(self, trusted: bool) -> None:  # noqa: FBT001 - a fact, not a mode
        """Whether what is held as certain counts as such now."""


class IndexSink:
    """Applies a feed to one rank's part of the index; a `Sink`.

    block_size: tokens in a block, as its last store had it; asked for at every pick.
    listener: is shown every batch after it was applied; None, as mostly, costs nothing. emptied: is
    called when a batch cleared the cache.
    """

    def __init__(self, index: Index, owner: Owner) -> None:
        self.owner = owner
        self.listener: Listener | None = None
        self.block_size: int | None = None
        self.emptied: Callable[[], None] | None = None
        self._index = index
        self._block_sizes = 0  # how often one was learned

    def applying(self, body: Body) -> Generator[None, None, Taken]:
        """Applies one batch; raises WireError where it is none."""
        before = self.owner.status
        had_uncertain = self.owner.uncertain_blocks > 0
        applied = yield from self._index.applying(self.owner, body)
        after = self.owner.status
        if after["block_size"] != before["block_size"]:
            self._tell_block_size(after["block_size"])
        missed = ""
        if "group_without_kind" in applied.faults:
            missed = "its attention groups cannot be told apart"
        elif not _HUGE.isdisjoint(applied.faults):
            missed = "it stored blocks with longer hashes or extra keys than engines have"
        elif applied.removal_lost:
            missed = "an event that may have been a removal could not be read"
        elif after["over_limit"] != before["over_limit"]:
            missed = "it holds more than the index keeps of one rank"
        healed = (applied.clears or had_uncertain) and not self.owner.uncertain_blocks
        if applied.clears and self.emptied is not None:
            self.emptied()
        if self.listener is not None and _is_shown(body):
            self._show(self.listener, body)
        return Taken(healed and not missed, missed, applied.faults)

    def forgetting(self) -> Generator[None, None, None]:
        """Forgets all that the rank held."""
        yield from self._index.clearing(self.owner)

    def demoting(self) -> Generator[None, None, None]:
        """Makes all that the rank holds uncertain."""
        yield from self._index.demoting(self.owner)

    def trust(self, trusted: bool) -> None:  # noqa: FBT001, D102 - as Sink has it
        self.owner.trusted = trusted

    def _tell_block_size(self, block_size: int) -> None:
        """Tells of the 1st, 2nd, 4th ... change: a publisher may take two sizes in turns."""
        self.block_size = block_size
        self._block_sizes += 1
        if self._block_sizes & (self._block_sizes - 1) == 0:
            log.info("%s: block size learned: %s", self.owner.worker, block_size)

    def _show(self, listener: Listener, body: Body) -> None:
        """A listener that fails is not called again; the feed goes on."""
        try:
            listener(body)
        except Exception as error:  # noqa: BLE001 - whatever it is, the feed must go on
            self.listener = None
            # without the error's text, which may quote tokens
            log.error("%s: a listener failed: %s", self.owner.worker, type(error).__name__)


def _is_shown(body: Body) -> bool:
    if isinstance(body, EventBatch):
        return len(body.events) <= MAX_SHOWN_EVENTS
    return len(body) <= MAX_SHOWN_BYTES


class Place(NamedTuple):
    """Whose feed it is, for messages."""

    worker: str
    rank: int


class FeedNews:
    """What is told of one feed, each thing once.

    counts: by name. replay_fault: why the last replay failed, "" if it did not. emptied: is called
    when the publisher restarted, and so holds nothing of what it held.
    """

    def __init__(self, place: Place, feed: Feed) -> None:
        self.place = place
        self.counts: Counter[str] = Counter()
        self.replay_fault = ""
        self.emptied: Callable[[], None] | None = None
        self._feed = feed
        self._told = feed.state, feed.reason
        self._restarts_told = 0
        self._is_unreached_told = False

    @property
    def reason(self) -> str:
        """Why the feed is in its state; of one in which all is well, what it would lack."""
        return self._feed.reason or self.replay_fault

    def tell_change(self) -> None:
        """Tells of another state, or of another reason for it, if it is one.

        A connection that is lost, or cannot be made, is a warning, once: why it cannot be made may
        change with every try.
        """
        state, reason, before = self._feed.state, self.reason, self._told[0]
        if (state, reason) == self._told:
            return
        self._told = state, reason
        shown = f" ({reason})" if reason else ""
        if state is State.CONNECTING:
            level = logging.DEBUG if self._is_unreached_told else logging.WARNING
            self._is_unreached_told = True
        else:
            is_lost = state is State.STALE and before is not State.STALE
            level = logging.WARNING if is_lost else logging.INFO
        log.log(level, "feed of %s rank %d: %s%s", *self.place, state, shown)

    def tell_restart(self) -> None:
        """Tells of a restart of the publisher, if there was one."""
        if self._feed.restarts > self._restarts_told:
            self._restarts_told = self._feed.restarts
            if self.emptied is not None:
                self.emptied()

    def tell_undecodable(self, error: WireError) -> None:
        """Counts it; tells of the 1st, 2nd, 4th ..., or a broken publisher would fill the log."""
        self.counts["undecodable_batch"] += 1
        count = self.counts["undecodable_batch"]
        if count & (count - 1) == 0:
            log.warning("%s rank %d: %s (%d so far)", *self.place, error, count)
