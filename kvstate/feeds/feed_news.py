"""What is reported of one feed: to the log, and by its counters."""

import logging
from collections import Counter
from collections.abc import Callable

from kvstate.errors import WireError
from kvstate.events import BatchResult, Loss
from kvstate.feeds.feed import Feed, FeedState
from kvstate.feeds.transport import RankName
from kvstate.seldom import is_logged

log = logging.getLogger("kvsteer.feed")

Call = Callable[[], None]
NoteLoss = Callable[[Loss], None]

# Why nothing of a connected feed can be used, and after how many such messages in a row.
UNSEQUENCED = "its messages have no sequence number"
UNSEQUENCED_MESSAGES = 3

BEHIND = "behind: events arrive faster than they are applied"


class FeedNews:
    """The news of one feed, each reported once.

    counts: by name. replay_fault: why the last replay failed, "" if it did not. is_behind: events
    arrive faster than they are applied, so that nothing is certain. emptied: is called when the
    rank loses all blocks. cut: is called when
    its connection is lost.
    """

    def __init__(self, place: RankName, feed: Feed, emptied: NoteLoss, cut: Call) -> None:
        self.place = place
        self.counts: Counter[str] = Counter()
        self.replay_fault = ""
        self.is_behind = False
        self._unsequenced = 0  # live messages in a row
        self._feed = feed
        self._emptied = emptied
        self._cut = cut
        self._logged = feed.state, feed.reason
        self._logged_restarts = 0
        self._has_logged_unreached = False

    @property
    def reason(self) -> str:
        """Why the feed is in its state; for a healthy feed, what it lacks (a replay)."""
        reason = self._feed.reason or self.replay_fault
        first = UNSEQUENCED if self.is_unsequenced else BEHIND if self.is_behind else ""
        return "; ".join(filter(None, (first, reason)))

    @property
    def is_unsequenced(self) -> bool:
        """Whether several messages without a sequence number came in a row."""
        return self._unsequenced >= UNSEQUENCED_MESSAGES

    def note_batch(self) -> None:
        """Notes that a live batch came."""
        self._unsequenced = 0

    def note_malformed(self, *, is_load: bool) -> None:
        """Notes a live message without a sequence number, or (is_load) no load report."""
        self.counts["malformed_message"] += 1
        self._unsequenced += not is_load

    def note_behind(self, *, is_behind: bool) -> None:
        """Notes whether events arrive faster than they are applied, and counts each start."""
        if is_behind and not self.is_behind:
            self.counts["behind"] += 1
        self.is_behind = is_behind

    def tell_change(self) -> None:
        """Logs a change of the state or of its reason.

        A connection that is lost, or cannot be made, is logged as a warning, once: the reason may
        change with every try. So is a feed that is behind.
        """
        state, reason, before = self._feed.state, self.reason, self._logged[0]
        if (state, reason) == self._logged:
            return
        self._logged = state, reason
        shown = f" ({reason})" if reason else ""
        if state is FeedState.CONNECTING:
            level = logging.DEBUG if self._has_logged_unreached else logging.WARNING
            self._has_logged_unreached = True
        else:
            is_cut = state is FeedState.STALE and before is not FeedState.STALE
            is_bad = self.is_behind or self.is_unsequenced or is_cut
            level = logging.WARNING if is_bad else logging.INFO
            if is_cut:
                self._cut()
        log.log(level, "feed of %s rank %d: %s%s", *self.place, state, shown)

    def tell_replay(self, fault: str = "") -> None:
        """Notes the end of a replay, and logs why it failed, if the one before did not fail too."""
        if fault and not self.replay_fault:
            log.warning("feed of %s rank %d: %s", *self.place, fault)
        self.replay_fault = fault

    def tell_restart(self) -> None:
        """Reports a restart of the publisher, if there was one."""
        if self._feed.restarts > self._logged_restarts:
            self._logged_restarts = self._feed.restarts
            self._emptied(Loss.RESTARTED)

    def tell_undecodable(self, error: WireError) -> None:
        """Counts an undecodable batch; logs it only seldom."""
        self.counts["undecodable_batch"] += 1
        count = self.counts["undecodable_batch"]
        if is_logged(count):
            log.warning("%s rank %d: %s (%d so far)", *self.place, error, count)

    def count_result(self, result: BatchResult) -> None:
        """Counts the skipped events of a batch, and reports the loss of all blocks."""
        if result.faults:
            self.counts.update(result.faults)
        if result.clears:
            self._emptied(Loss.CLEARED)
