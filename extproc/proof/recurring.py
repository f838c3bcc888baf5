"""The cause of a worker's wrong predictions, if it recurs.

A prediction is what the worker held of a prompt by its feed when it was picked, certain or not,
and right if the engine reports as much as cached. A cause that explains most of the last wrong
ones is a state, until most of the last predictions are right again.

Time is an argument: seconds of one monotonic clock.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from extproc.proof.tally import LAST_FINDINGS

# How many of the last wrong predictions one cause must explain, and how many of the last ones must
# be right to end that.
EXPLAINED = 6
RIGHT = 6

# Older wrong predictions do not count.
RECENT_SECONDS = 600.0


class CauseText(NamedTuple):
    """A cause in words, and what to do. lowers: whether all that the feed shows is uncertain."""

    says: str
    remedy: str
    lowers: bool = True


# The causes of `extproc.observing.outcomes` that show a fault. The others are races, or have a
# state of their own.
CAUSES: Mapping[str, CauseText] = {
    "block_size": CauseText(
        "its engine reuses other blocks than its feed or the configuration says",
        "check `workers[].block_size`",
    ),
    "draft_drop": CauseText(
        "its engine computes the last blocks that it holds again, as with a draft model",
        "nothing, if it runs one: the router learns how many",
    ),
    "feed_of_another": CauseText(
        "another worker's feed announced what it computed",
        "give each worker its own publisher in `events`: `kvsteer doctor --probe` says which",
    ),
    "group_missing": CauseText(
        "its engine reuses another part than its attention groups suggest",
        "see `reuse` in GET /workers",
    ),
    "rank_ignored": CauseText(
        "it computed requests on another rank than they named",
        "see `pins` in GET /workers",
    ),
    "token_mismatch": CauseText(
        "its engine counted other prompt tokens",
        "give the router the engine's tokenizer and template",
    ),
    "unknown": CauseText(
        "nothing that its feed told explains them",
        "see that the feed is this worker's, and tells all: `kvsteer doctor --probe` looks",
        lowers=False,
    ),
}


class RecurringCause:
    """The last predictions for one worker. cause: the one that recurs, one of `CAUSES`, or ""."""

    def __init__(self) -> None:
        self._are_right: deque[bool] = deque(maxlen=LAST_FINDINGS)
        self._wrong: deque[tuple[str, float]] = deque(maxlen=LAST_FINDINGS)
        self.cause = ""

    def note(self, cause: str, now: float) -> None:
        """Notes a prediction that could be compared. cause: why it was wrong, "" if it was not."""
        self._are_right.append(not cause)
        if cause:
            self._wrong.append((cause, now))
        if self._are_right.count(True) >= RIGHT:
            self.cause = ""
        elif cause:
            recent = [its for its, at in self._wrong if now - at <= RECENT_SECONDS]
            if cause in CAUSES and recent.count(cause) >= EXPLAINED:
                self.cause = cause

    @property
    def lowers(self) -> bool:
        """Whether all that the worker's feed shows is uncertain."""
        return bool(self.cause) and CAUSES[self.cause].lowers

    @property
    def in_words(self) -> str:
        """The cause that recurs and what to do, "" if none does."""
        if not self.cause:
            return ""
        words = CAUSES[self.cause]
        most = f"{EXPLAINED} of its last {LAST_FINDINGS} wrong predictions"
        return f"{most} have one cause: {words.says} (`{self.cause}`); {words.remedy}"

    def clear(self) -> None:
        """Forgets all predictions."""
        self._are_right.clear()
        self._wrong.clear()
        self.cause = ""
