"""Totals of verdicts: tokens by cause, by client, and in seconds of prefill."""

from collections import Counter
from typing import Any

import msgspec

from extproc.features.misses.breaks import BreakKey, Breaks, said
from extproc.features.misses.breaks import as_json as break_as_json
from extproc.features.misses.partition import Cause, computed_again, main_cause
from extproc.features.misses.sender import Sender
from extproc.features.misses.verdicts import Verdict

# Most senders that are told apart: models, clients and tenants together.
MOST_SENDERS = 256
OTHERS = "others"

# Most breaks that GET /misses lists, and that the report names.
MOST_SHOWN, MOST_SAID = 32, 3

_HOUR_SECONDS = 3_600


class SenderTotals(msgspec.Struct):
    """What came from a sender: turns, their tokens by cause, and seconds of prefill.

    saved_seconds: for tokens that were reused. again_seconds: for those computed again.
    """

    turns: int = 0
    tokens: Counter[Cause] = msgspec.field(default_factory=Counter)
    saved_seconds: float = 0.0
    again_seconds: float = 0.0


class Totals:
    """The totals of one router since its start.

    price: of a worker's hour, 0 for none. ways: how many verdicts were found in which way.
    """

    def __init__(self, price: float = 0.0) -> None:
        self._price = price
        self._by_sender: dict[Sender, SenderTotals] = {}
        self._breaks = Breaks()
        self.ways: Counter[str] = Counter()

    def count(self, verdict: Verdict) -> None:
        """Counts a verdict that is complete."""
        totals = self._by_sender.get(verdict.sender) or self._totals_of(verdict.sender)
        totals.turns += 1
        held, counts = verdict.held, totals.tokens
        reused = held.reused
        totals.saved_seconds += verdict.seconds * reused
        if held.is_fine:  # most turns
            behind = max(reused, held.kept)
            counts[Cause.REUSED] += reused
            counts[Cause.BLOCK] += behind - reused
            counts[Cause.NEW] += held.prompt - behind
        else:
            self._count_missed(verdict, totals)

    def _count_missed(self, verdict: Verdict, totals: SenderTotals) -> None:
        tokens, seconds = verdict.tokens, verdict.seconds
        totals.tokens.update(tokens)
        totals.again_seconds += seconds * computed_again(tokens)
        changed, change = tokens.get(Cause.CHANGED, 0), verdict.change
        if change is not None and changed:
            key = BreakKey(verdict.sender, change.place, change.index, change.kind)
            self._breaks.add(key, change, changed, seconds * changed)

    def _totals_of(self, sender: Sender) -> SenderTotals:
        """Returns the totals of a sender that is new, or of those that are too many."""
        if len(self._by_sender) >= MOST_SENDERS:
            sender = Sender(sender.model, OTHERS, "")
        return self._by_sender.setdefault(sender, SenderTotals())

    def tokens(self) -> Counter[Cause]:
        """Returns all tokens by cause."""
        return sum([one.tokens for one in self._by_sender.values()], Counter[Cause]())

    def sentences(self) -> list[str]:
        """Returns in words what became of the prompts, and who breaks the cache; none at first."""
        tokens = self.tokens()
        total, again = tokens.total(), computed_again(tokens)
        if not total:
            return []
        parts = (f"{tokens[Cause.REUSED] / total:.0%} were reused", f"{again / total:.0%} computed")
        first = f"of {total:,} prompt tokens since the start {' and '.join(parts)} again"
        worst = self._breaks.worst()[:MOST_SAID]
        return [first, *(said(key, found, again) for key, found in worst)]

    def as_json(self) -> dict[str, Any]:
        """Returns the totals of GET /misses: who wastes most comes first."""
        tokens = self.tokens()
        again = computed_again(tokens)
        ranked = sorted(self._by_sender.items(), key=lambda one: -one[1].again_seconds)
        return {
            "tokens": {cause.value: count for cause, count in tokens.items()},
            "again_tokens": again,
            "breaks": [break_as_json(*one, again) for one in self._breaks.worst()[:MOST_SHOWN]],
            "clients": [self._sender_as_json(*one) for one in ranked],
        }

    def _sender_as_json(self, sender: Sender, totals: SenderTotals) -> dict[str, Any]:
        hour = self._price / _HOUR_SECONDS
        return {
            **sender._asdict(),
            "turns": totals.turns,
            "prompt_tokens": totals.tokens.total(),
            "tokens": {cause.value: count for cause, count in totals.tokens.items() if count},
            "again_tokens": computed_again(totals.tokens),
            "cause": main_cause(totals.tokens) or "",
            "saved_seconds": round(totals.saved_seconds, 3),
            "again_seconds": round(totals.again_seconds, 3),
            "saved_price": round(totals.saved_seconds * hour, 4) if hour else None,
            "again_price": round(totals.again_seconds * hour, 4) if hour else None,
        }

    def by_client(self) -> dict[tuple[str, str], SenderTotals]:
        """Returns what came from each client, whatever the tenant."""
        found: dict[tuple[str, str], SenderTotals] = {}
        for sender, totals in self._by_sender.items():
            known = found.setdefault((sender.model, sender.client), SenderTotals())
            known.tokens.update(totals.tokens)
            known.again_seconds += totals.again_seconds
        return found
