"""What is told of one feed: counters, log lines, and a call when its publisher restarted."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvstate.errors import WireError
from kvstate.feeds.feed import Feed
from kvstate.feeds.feed_terms import State
from kvstate.feeds.sink import Body

log = logging.getLogger("kvsteer.feed")


class Place(NamedTuple):
    """Whose feed it is, for messages."""

    worker: str
    rank: int


class FeedNews:
    """What is told of one feed, each thing once.

    counts: by name. replay_fault: why the last replay failed, "" if it did not. emptied: is called
    when the publisher restarted, and so holds nothing of what it held.
    """

    def __init__(self, place: Place, feed: Feed[Body]) -> None:
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
