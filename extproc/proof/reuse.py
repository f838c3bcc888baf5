"""Learns from outcomes whether a worker's engine reuses what its events say that it can.

A draft model (vLLM's EAGLE and MTP) makes the engine compute the last block that it holds again: so
outcomes are lower than what is held by exactly one unit, nearly always. A unit is a block, or in
models with several kinds of attention the least common multiple of their blocks. The rules by which
an engine with several kinds reuses a prefix differ by release: where outcomes are lower than
predicted more often than by chance, the worker's credit is uncertain until they agree again.
"""

from collections import deque
from enum import Enum
from typing import Any

# The last outcomes that count.
RECENT = 20

# A draft is learned from so many outcomes, of which at least this share is lower by one unit; and
# forgotten when more than half of as many are higher by one.
LEAST_OUTCOMES = 8
DRAFT_SHARE = 0.9

# So many recent outcomes that are too low are more than chance.
DOUBTFUL = 3

DRAFT_DROP, GROUP_MISSING = "draft_drop", "group_missing"


class _OutcomeKind(Enum):
    EXACT = 0
    LOWER_BY_ONE = 1
    LOWER = 2
    HIGHER_BY_ONE = 3
    HIGHER = 4


class ReuseFindings:
    """What the outcomes of one worker show; part of its record.

    draft_drop: how many units at the end of what it holds it computes again, as far as is learned.
    doubt: why its credit is uncertain, DRAFT_DROP or GROUP_MISSING; "" while it is not.
    """

    __slots__ = ("_recent", "_since", "doubt", "draft_drop")

    def __init__(self) -> None:
        self.draft_drop = 0
        self.doubt = ""
        self._recent: deque[_OutcomeKind] = deque(maxlen=RECENT)
        self._since = 0  # outcomes since the last one that was too low

    def forget(self) -> None:
        """Forgets everything: the engine may be another one."""
        self.draft_drop, self.doubt, self._since = 0, "", 0
        self._recent.clear()

    def suspect_draft(self) -> None:
        """Notes that the engine may run a draft model, before any outcome shows it."""
        self.doubt = DRAFT_DROP

    def note(self, error_tokens: int, unit_tokens: int, *, has_groups: bool) -> None:
        """Notes one outcome of a prompt of which something could be reused.

        error_tokens: what the worker could reuse by its events, less what it reported. unit_tokens:
        one unit. has_groups: whether it has, or may have, several kinds of attention.
        """
        kind = _kind_of(error_tokens, unit_tokens)
        self._recent.append(kind)
        self._since = 0 if error_tokens > 0 else self._since + 1
        if not self._learn_draft():
            self._judge(has_groups=has_groups)

    def cause(
        self, error_tokens: int, unit_tokens: int, *, has_groups: bool, are_known: bool = True
    ) -> str:
        """Returns why an outcome was too low, if this explains it, else "".

        are_known: whether the feed shows what the groups hold. If it does, a rare outcome is not
        blamed on them: blocks may be removed between pick and prefill, which stores them again.
        """
        if error_tokens == unit_tokens and self._drafts():
            return DRAFT_DROP
        is_doubted = has_groups and (self.doubt != "" or not are_known)
        return GROUP_MISSING if error_tokens > 0 and is_doubted else ""

    def as_json(self) -> dict[str, Any]:
        """Returns its part of the entry in GET /workers."""
        return {"draft_drop": self.draft_drop, "uncertain_because": self.doubt}

    def _drafts(self) -> bool:
        """Whether most recent outcomes are as a draft makes them."""
        return 2 * self._recent.count(_OutcomeKind.LOWER_BY_ONE) > len(self._recent)

    def _learn_draft(self) -> bool:
        """Learns that the worker drafts, or that it does not; returns whether that is new."""
        count = len(self._recent)
        if count < LEAST_OUTCOMES:
            return False
        drafts = self._recent.count(_OutcomeKind.LOWER_BY_ONE) >= DRAFT_SHARE * count
        last = list(self._recent)[-LEAST_OUTCOMES:]
        ends = 2 * last.count(_OutcomeKind.HIGHER_BY_ONE) > LEAST_OUTCOMES
        if not drafts and not (ends and self.draft_drop):
            return False
        drop = self.draft_drop + 1 if drafts else 0
        self.forget()
        self.draft_drop = drop
        return True

    def _judge(self, *, has_groups: bool) -> None:
        """Decides whether the outcomes are in doubt."""
        by_one = self._recent.count(_OutcomeKind.LOWER_BY_ONE)
        lower = by_one + self._recent.count(_OutcomeKind.LOWER)
        if self.doubt:
            self.doubt = "" if self._since >= RECENT else self.doubt
        elif self._drafts() and by_one >= DOUBTFUL:
            self.doubt = DRAFT_DROP
        elif has_groups and lower >= DOUBTFUL:
            self.doubt = GROUP_MISSING


def _kind_of(error: int, unit: int) -> _OutcomeKind:
    if error == 0:
        return _OutcomeKind.EXACT
    if error > 0:
        return _OutcomeKind.LOWER_BY_ONE if error == unit else _OutcomeKind.LOWER
    return _OutcomeKind.HIGHER_BY_ONE if error == -unit else _OutcomeKind.HIGHER
