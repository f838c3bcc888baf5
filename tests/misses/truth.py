"""What became of each token of a prompt, from what engines held and reported. Pure.

It is made without the router: from the prompts as the engine got them, the tokens that it reused,
what the worker of the turn before still held, and what the play made happen.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.misses.engine_prompts import first_difference

# A prompt ends with the question for an answer; one that goes on need not keep that.
ASKING_TOKENS = 16

# Of what could have been reused: what a verdict's cause may be.
CAUSES = (
    "changed",
    "evicted",
    "elsewhere",
    "restarted",
    "cleared",
    "gone",
    "not_stored",
    "unknown",
)


class Truth(NamedTuple):
    """tokens: by cause, none that is 0; they add up to the prompt. kept: of the turn before.

    cause: of most tokens that could have been reused and were not, "" if there is none.
    is_changed: whether the prompt leaves the one before.
    """

    tokens: Mapping[str, int]
    kept: int
    cause: str
    is_changed: bool


def truth_of(
    before: Sequence[int],
    prompt: Sequence[int],
    *,
    block: int,
    cached: int,
    left_behind: int = 0,
    lost_by: str = "unknown",
) -> Truth:
    """Returns what became of a prompt's tokens.

    before: the prompt of the turn before. block: the tokens of a block. cached: those that the
    engine reused. left_behind: the leading tokens that another worker held, which had the turn
    before. lost_by: why what nobody holds is lost.
    """
    kept = first_difference(before, prompt)
    last = kept if kept > len(before) - ASKING_TOKENS else len(before)
    usable = min(kept, len(prompt) - 1) // block * block
    ends = (
        ("reused", cached),
        ("elsewhere", min(left_behind, usable)),
        (lost_by, usable),
        ("block", kept),
        ("changed", min(last, len(prompt))),
        ("new", len(prompt)),
    )
    tokens: dict[str, int] = {}
    begun = 0
    for cause, end in ends:
        if end > begun:
            tokens[cause] = tokens.get(cause, 0) + end - begun
            begun = end
    again = {cause: tokens[cause] for cause in CAUSES if cause in tokens}
    return Truth(tokens, kept, max(again, key=again.__getitem__, default=""), last > kept)
