"""When blocks that a rank holds unseen do not matter any more."""

# An engine that evicts what was used longest ago evicts what was never seen before anything that
# was stored since. So a run of removals of this share of what is held, all of blocks stored since,
# shows that no others are left to come; for other engines that few are.
RUN_SHARE = 1 / 8


class Turnover:
    """Whether the blocks that a rank held unseen, at the last hole, have left its cache since.

    The engine may hold blocks that were stored before the first batch received, or in a hole.
    They earn no credit, and their removals are unknown. Only a clear proves that none is left: an
    engine announces no hits, so one that is used all the time stays, unseen. The feed is healed
    when such blocks are all that can be left of the unseen:

    - their removals have come: of the last removals, as many as an eighth of the blocks held, all
      were of blocks stored since the hole; or
    - the cache was replaced: as many of the blocks stored since were removed as are held now.

    That raises no credit: each block is certain by its own store since the hole, or not at all.
    With a cache of c blocks and at most u known from before the hole, it takes at most 2c + u
    stores, whichever blocks the engine evicts: of the blocks stored, at most c are still held.
    """

    def __init__(self) -> None:
        self._removed_before = 0
        self._run_begins = 0  # the blocks removed before the last removal that was unknown
        self._unknown = 0
        self.is_waiting = True  # for the unseen to leave

    def begin(self, removed: int) -> None:
        """Begins again, after a hole. removed: how many certain blocks were removed so far."""
        self._removed_before = self._run_begins = removed
        self.is_waiting = True

    def is_complete(self, removed: int, unknown: int, held: int) -> bool:
        """Returns True once, when what was unseen does not matter any more.

        removed: how many certain blocks were removed so far. unknown: how many removals named no
        block that was held. held: how many blocks are held now.
        """
        if not self.is_waiting:
            return False
        if unknown != self._unknown:
            self._unknown, self._run_begins = unknown, removed
        is_run = removed - self._run_begins >= max(1, held * RUN_SHARE)
        if not (is_run or 0 < held <= removed - self._removed_before):
            return False
        self.is_waiting = False
        return True
