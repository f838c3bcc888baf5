"""Where the tokens of a prompt came from, or why they were computed: each is counted once."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class Cause(StrEnum):
    """Why tokens of a prompt were computed, or that they were not."""

    # In the cache of the worker that answered.
    REUSED = "reused"
    # Added since the conversation's last prompt.
    NEW = "new"
    # Of a conversation that begins.
    FIRST = "first"
    # Behind the last whole block, which is all that an engine reuses.
    BLOCK = "block"
    # Behind the first token at which the prompt is no longer as the last one was.
    CHANGED = "changed"
    # The worker held them, and evicted them.
    EVICTED = "evicted"
    # Held by another worker than the one that answered.
    ELSEWHERE = "elsewhere"
    # The worker's engine has started anew.
    RESTARTED = "restarted"
    # The worker's cache was cleared.
    CLEARED = "cleared"
    # The worker that held them is no longer among the workers, or was given up as dead.
    GONE = "gone"
    # The last prompt was not stored: its request failed.
    NOT_STORED = "not_stored"
    # It is not known: for instance the router has not seen the conversation's last prompt.
    UNKNOWN = "unknown"


# What is computed again, and could have been reused.
AGAIN = (
    Cause.CHANGED,
    Cause.EVICTED,
    Cause.ELSEWHERE,
    Cause.RESTARTED,
    Cause.CLEARED,
    Cause.GONE,
    Cause.NOT_STORED,
    Cause.UNKNOWN,
)

Tokens = Mapping[Cause, int]


class Held(msgspec.Struct, gc=False):
    """What is known of a prompt's tokens and of the caches; all in tokens.

    prompt: how many it has. reused: how many of its first ones were reused. block: the tokens of a
    block. last: how many the conversation's last prompt had, None if none is known. kept: how many
    of its first ones both have. elsewhere: how many of the first ones another worker held. gone:
    why those are not held that are held nowhere. beginning: what those are of a prompt whose
    conversation is not known.
    """

    prompt: int
    reused: int
    block: int = 1
    last: int | None = None
    kept: int = 0
    elsewhere: int = 0
    gone: Cause = Cause.UNKNOWN
    beginning: Cause = Cause.FIRST

    @property
    def is_lacking(self) -> bool:
        """Whether less was reused of what is kept than an engine can reuse."""
        return self.reused < min(self.kept, self.prompt - 1) // self.block * self.block

    @property
    def is_fine(self) -> bool:
        """Whether all of the last prompt is kept, and all that can be reused of it was."""
        kept = self.kept
        return kept == self.last and kept <= self.prompt and not self.is_lacking


def partition(held: Held) -> Tokens:
    """Returns how many tokens of a prompt there are of each cause; they add up to the prompt.

    An engine reuses whole blocks, and not the last token (`usable_tokens`).
    """
    prompt, reused = held.prompt, min(held.reused, held.prompt)
    if held.last is None:
        return _counted({Cause.REUSED: reused, held.beginning: prompt - reused})
    if held.is_fine:  # most turns
        block = max(0, held.kept - reused)
        return _counted(
            {Cause.REUSED: reused, Cause.BLOCK: block, Cause.NEW: prompt - reused - block}
        )
    kept = min(held.kept, held.last, prompt)
    usable = max(0, min(kept, prompt - 1)) // held.block * held.block
    ends = (
        (Cause.REUSED, reused),
        (Cause.ELSEWHERE, min(held.elsewhere, usable)),
        (held.gone, usable),
        (Cause.BLOCK, kept),
        (Cause.CHANGED, min(held.last, prompt)),
        (Cause.NEW, prompt),
    )
    found: dict[Cause, int] = {}
    begun = 0
    for cause, end in ends:
        found[cause] = found.get(cause, 0) + max(0, end - begun)
        begun = max(begun, end)
    return _counted(found)


def main_cause(tokens: Tokens) -> Cause | None:
    """Returns why most of what was computed again was; None if nothing was."""
    again = [cause for cause in AGAIN if tokens.get(cause)]
    return max(again, key=lambda cause: tokens[cause], default=None)


def computed_again(tokens: Tokens) -> int:
    """Returns how many tokens could have been reused, and were computed."""
    return sum([tokens.get(cause, 0) for cause in AGAIN])


def _counted(tokens: dict[Cause, int]) -> Tokens:
    return {cause: count for cause, count in tokens.items() if count}
