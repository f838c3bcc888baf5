"""Totals of verdicts: tokens by cause, by client, and in seconds of prefill."""

from collections import Counter
from typing import Any, NamedTuple

import msgspec

from extproc.features.misses.breaks import BreakKey, Breaks, said
from extproc.features.misses.breaks import as_json as break_as_json
from extproc.features.misses.partition import Cause, computed_again, main_cause
from extproc.features.misses.verdicts import Verdict

# Most senders that are told apart: models, clients and tenants together.
MOST_SENDERS = 256
OTHERS = "others"

# Most breaks that GET /misses lists, and that the report names.
MOST_SHOWN, MOST_SAID = 32, 3

_HOUR_SECONDS = 3_600


class Sender(NamedTuple):
    """Whose requests are counted together. tenant: eight hexadecimal digits, "" for none."""

    model: str
    client: str
    tenant: str


class Sent(msgspec.Struct):
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
        self._sent: dict[Sender, Sent] = {}
        self._breaks = Breaks()
        self.ways: Counter[str] = Counter()

    def count(self, verdict: Verdict) -> None:
        """Counts a verdict that is complete."""
        sender = Sender(verdict.model, verdict.client, verdict.tenant)
        sent = self._sent.get(sender) or self._sent_by(sender)
        sent.turns += 1
        held, counts = verdict.held, sent.tokens
        sent.saved_seconds += verdict.seconds * held.reused
        if held.is_fine:  # most turns
            block = max(0, held.kept - held.reused)
            counts[Cause.REUSED] += held.reused
            counts[Cause.BLOCK] += block
            counts[Cause.NEW] += held.prompt - held.reused - block
        else:
            self._count_missed(verdict, sender, sent)

    def _count_missed(self, verdict: Verdict, sender: Sender, sent: Sent) -> None:
        tokens, seconds = verdict.tokens, verdict.seconds
        sent.tokens.update(tokens)
        sent.again_seconds += seconds * computed_again(tokens)
        changed, change = tokens.get(Cause.CHANGED, 0), verdict.change
        if change is not None and changed:
            key = BreakKey(*sender, change.place, change.index, change.kind)
            self._breaks.add(key, change, changed, seconds * changed)

    def _sent_by(self, sender: Sender) -> Sent:
        """Returns what came from a sender that is new, or from one too many."""
        if len(self._sent) >= MOST_SENDERS:
            sender = Sender(sender.model, OTHERS, "")
        return self._sent.setdefault(sender, Sent())

    def tokens(self) -> Counter[Cause]:
        """Returns all tokens by cause."""
        return sum([one.tokens for one in self._sent.values()], Counter[Cause]())

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
        ranked = sorted(self._sent.items(), key=lambda one: -one[1].again_seconds)
        return {
            "tokens": {cause.value: count for cause, count in tokens.items()},
            "again_tokens": again,
            "breaks": [break_as_json(*one, again) for one in self._breaks.worst()[:MOST_SHOWN]],
            "clients": [self._sender_as_json(*one) for one in ranked],
        }

    def _sender_as_json(self, sender: Sender, sent: Sent) -> dict[str, Any]:
        hour = self._price / _HOUR_SECONDS
        return {
            **sender._asdict(),
            "turns": sent.turns,
            "prompt_tokens": sent.tokens.total(),
            "tokens": {cause.value: count for cause, count in sent.tokens.items() if count},
            "again_tokens": computed_again(sent.tokens),
            "cause": main_cause(sent.tokens) or "",
            "saved_seconds": round(sent.saved_seconds, 3),
            "again_seconds": round(sent.again_seconds, 3),
            "saved_price": round(sent.saved_seconds * hour, 4) if hour else None,
            "again_price": round(sent.again_seconds * hour, 4) if hour else None,
        }

    def by_client(self) -> dict[tuple[str, str], Sent]:
        """Returns what came from each client, whatever the tenant."""
        found: dict[tuple[str, str], Sent] = {}
        for sender, sent in self._sent.items():
            known = found.setdefault((sender.model, sender.client), Sent())
            known.tokens.update(sent.tokens)
            known.again_seconds += sent.again_seconds
        return found
