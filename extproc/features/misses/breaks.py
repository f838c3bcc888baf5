"""Who breaks the cache: turns whose prompts changed, by client, place and kind.

A client that changes its prompt does so in every turn, at the same place. So few entries say most;
they are bounded, and the one that cost least gives way.
"""

from typing import Any, NamedTuple

import msgspec

from extproc.features.misses.change import Kind
from extproc.features.misses.sender import Sender
from extproc.features.misses.verdicts import Change, change_as_json

# Most breaks that are told apart.
MOST_BREAKS = 256


class BreakKey(NamedTuple):
    """What is counted together: the changes of one sender, at one place, of one kind."""

    sender: Sender
    place: str
    part: int | None
    kind: Kind | None


class Break(msgspec.Struct):
    """Changes that are counted together.

    turns: in how many they came. tokens: computed again for them. first, last: the least and the
    most tokens before them. seconds: of prefill that they cost.
    """

    turns: int = 0
    tokens: int = 0
    first: int = 0
    last: int = 0
    seconds: float = 0.0

    def add(self, at: int, tokens: int, seconds: float) -> None:
        """Counts one more."""
        self.first = min(self.first, at) if self.turns else at
        self.last = max(self.last, at)
        self.turns += 1
        self.tokens += tokens
        self.seconds += seconds


class Breaks:
    """The changes of one router's clients."""

    def __init__(self) -> None:
        self._known: dict[BreakKey, Break] = {}

    def add(self, key: BreakKey, change: Change, tokens: int, seconds: float) -> None:
        """Counts a turn whose prompt changed. tokens: computed again for it."""
        known = self._known.get(key)
        if known is None:
            if len(self._known) == MOST_BREAKS:
                del self._known[min(self._known, key=lambda one: self._known[one].tokens)]
            known = self._known[key] = Break()
        known.add(change.at, tokens, seconds)

    def worst(self) -> list[tuple[BreakKey, Break]]:
        """Returns the changes, the one that cost most tokens first."""
        return sorted(self._known.items(), key=lambda one: -one[1].tokens)


def as_json(key: BreakKey, found: Break, again: int) -> dict[str, Any]:
    """Returns one entry of `breaks` in GET /misses. again: all tokens computed again."""
    at = found.first if found.first == found.last else None
    change = Change(found.first, key.place, key.part, kind=key.kind)
    shown = change_as_json(change)
    return {
        **key.sender._asdict(),
        **shown,
        "at_token": at,
        "first_token": found.first,
        "last_token": found.last,
        "turns": found.turns,
        "tokens": found.tokens,
        "seconds": round(found.seconds, 3),
        "share": round(found.tokens / again, 3) if again else 0.0,
        "says": said(key, found, again),
    }


def said(key: BreakKey, found: Break, again: int) -> str:
    """Returns a sentence for an operator."""
    share = found.tokens / again if again else 0.0
    change = Change(found.first, key.place, key.part, kind=key.kind)
    requests = "1 request" if found.turns == 1 else f"{found.turns:,} requests"
    more = "" if found.first == found.last else f" (and up to token {found.last})"
    return (
        f"{share:.0%} of the tokens computed again come from {key.sender.in_words}, in {requests}:"
        f" {change.in_words}{more}; {found.tokens:,} tokens,"
        f" about {found.seconds:,.1f} s of prefill"
    )
