"""A feed that cannot ask for what was missed: a new connection brings it, or nothing does.

To the rules of `kvstate.feeds.feed` it adds (n is the number expected next):

    connected at first           what was stored before is not known
    connected again              as a gap whose size is not known; where it resumes, n - 1 proves it
    resumed with batch n - 1     nothing was missed
    resumed with another one     a hole, then as a live batch; a queue's n proves itself
    live batch > n               a hole
    live batch, of a restart     what comes before it is not known
    silence after resuming       a hole; a queue may have nothing to say

A connection that resumes is asked for n - 1, which coming again proves that the publisher is still
the same one. A queue never repeats: n proves that nothing was lost on the way, and a restarted one
begins with an event of its own.
"""

from kvstate.feeds.feed import NOTHING_YET, Feed
from kvstate.feeds.feed_terms import Body, Effect, Forget, Numbered, Recovery, State

_NO_REPLAY = "no replay endpoint: blocks stored before this connection are unknown"
_NOT_TO_BE_HAD = {
    Recovery.NONE: "no replay endpoint",
    Recovery.RESUME: "the publisher skipped them",
    Recovery.QUEUED: "another consumer drains this worker, or its event buffer overflowed",
}


class ResumingFeed(Feed[Body]):
    """One rank's feed.

    recovery: how what was missed can be had; no replay.
    """

    def __init__(self, recovery: Recovery) -> None:
        super().__init__()
        self._recovery = recovery

    def connected(self) -> list[Effect[Body]]:
        """The subscription is in place, for the first time or again."""
        if self._next is None:
            is_without = self._recovery is Recovery.NONE
            self._incomplete = _NO_REPLAY if is_without else NOTHING_YET
        elif self._recovery is Recovery.NONE:
            return self._hole("the connection was lost and there is no replay endpoint")
        else:
            self._unproven = self._next - 1
            self.state, self.reason = State.REPLAYING, f"resuming after batch {self._unproven}"
            return []
        self._settle()
        return []

    def quiet(self, *, for_long: bool = False) -> list[Effect[Body]]:  # noqa: ARG002 - no matter
        """Gives up waiting for the proof that nothing was missed."""
        if self._unproven is None or self._recovery is Recovery.QUEUED:
            return []  # also a snapshot under way, or a queue that may have lost its last events
        return self._end_resuming(f"batch {self._unproven} did not come again: no proof")

    def _receive(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        if self._unproven is not None:
            return self._resumed(batch, self._unproven)
        return self._live(batch)

    def _missed(self, batch: Numbered[Body], expected: int) -> list[Effect[Body]]:
        why = _NOT_TO_BE_HAD[self._recovery]
        return self._lose(expected, batch.sequence - 1, why) + self._take(batch)

    def _start_anew(self, reason: str, first: Numbered[Body]) -> list[Effect[Body]]:
        self._forget_publisher()
        self._incomplete = f"publisher restarted: {reason}; its first batches were not seen"
        self._settle()
        return [Forget(), *self._first(first)]

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
