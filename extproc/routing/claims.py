"""Claims: what each worker is assumed to hold for one request, weighed.

They combine overlaps and what was sent there. Certain tokens count fully. Uncertain ones, and those
only expected because they were sent, count beyond that with a discount; if both claim the same
tokens, the better claim counts.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from extproc.base.compiled import compiled_or
from extproc.config.schema import Cost
from extproc.routing.claim_table import Expected
from kvstate.overlap import Overlap, worth_tokens

__all__ = [
    "NO_CLAIMS",
    "Claims",
    "claims_of",
    "held_tokens",
    "plain_held",
    "plain_weighed",
    "weighed",
]

# In this state a feed is complete: blocks missing in the index are not cached, or on their way.
LIVE = "live"


class Claims(msgspec.Struct, frozen=True, gc=False):
    """One worker's claims in tokens, over all prompts of the request.

    saved: tokens that need not be computed, by the weights. speculative, approximate: tokens
    expected there beyond the certain ones, with or without a live feed.
    """

    saved: float = 0.0
    speculative: int = 0
    approximate: int = 0


NO_CLAIMS = Claims()

_NOTHING_HELD: Mapping[str, Overlap] = {}

# What is expected on a worker beyond what it certainly holds: the prompt's number, the worker's
# name, and the lengths.
Beyond = tuple[int, str, Expected]


def claims_of(
    held: Sequence[Mapping[str, Overlap]],
    expected: Sequence[Mapping[str, Expected]],
    state: Callable[[str], str],
    cost: Cost,
    block_size: Callable[[str], int],
) -> dict[str, Claims]:
    """Returns the claims of every worker that has any, by name.

    held, expected: one for each prompt; expected may be empty, and a text has only expected ones.
    state: returns the state of a worker's feeds, by its name; without a live feed, everything that
    was sent there counts. block_size: returns the block size of a worker's cache, in tokens.
    """
    unsure = cost.uncertain_percent / 100
    found, beyond = weighed(held, expected, unsure, worth_tokens, Claims)
    for number, name, lengths in beyond:  # usually none, whatever the states are
        overlaps = held[number] if held else _NOTHING_HELD
        known = overlaps.get(name)
        certain = 0 if known is None else known.certain_tokens
        is_live = bool(held) and state(name) == LIVE
        length = lengths[0] if is_live else lengths[1]
        if held and length > certain:  # engines keep only whole blocks
            length -= length % block_size(name)
        if length <= certain:
            continue
        behind = length - certain
        percent = cost.speculative_percent if is_live else cost.approximate_percent
        more = behind * percent / 100
        if known is not None:
            more = max(0.0, more - unsure * known.uncertain_tokens)
        found[name] = _added(found.get(name, NO_CLAIMS), more, behind, is_live=is_live)
    return found


def _added(before: Claims, more: float, behind: int, *, is_live: bool) -> Claims:
    """Returns the claims with the expected tokens of one more prompt."""
    saved, speculative, approximate = before.saved + more, before.speculative, before.approximate
    if is_live:
        return Claims(saved, speculative + behind, approximate)
    return Claims(saved, speculative, approximate + behind)


# What every request takes is compiled if a C compiler was available (extproc/native/claims.c); the
# `plain_` functions do the same, and tests compare the two.


def plain_weighed(
    held: Sequence[Mapping[str, Overlap]],
    expected: Sequence[Mapping[str, Expected]],
    unsure: float,
    worth: Callable[[Overlap, float], float],
    claims: type[Claims],
    /,
) -> tuple[dict[str, Claims], list[Beyond]]:
    """Returns what overlaps are worth, by worker, and what is expected beyond certain tokens.

    held, expected: as in `claims_of`. unsure: the value of an uncertain token. worth: returns what
    an overlap saves. claims: makes a worker's claims of the tokens that it saves.
    """
    found: dict[str, Claims] = {}
    for overlaps in held:
        for name, overlap in overlaps.items():
            tokens = worth(overlap, unsure)
            found[name] = claims(tokens + found[name].saved if name in found else tokens)
    beyond: list[Beyond] = []
    for number, each in enumerate(expected):
        overlaps = held[number] if held else _NOTHING_HELD
        for name, lengths in each.items():
            known = overlaps.get(name)
            if max(lengths) > (0 if known is None else known.certain_tokens):
                beyond.append((number, name, lengths))
    return found, beyond


def plain_held(name: str, overlaps: Sequence[Mapping[str, Overlap]], /) -> tuple[int, int]:
    """Returns how many tokens a worker certainly holds of prompts, and how many perhaps."""
    own = [each[name] for each in overlaps if name in each]
    certain = sum([one.certain_tokens for one in own])
    return certain, sum([one.uncertain_tokens for one in own])


held_tokens = compiled_or("held_tokens", plain_held)
weighed = compiled_or("weighed", plain_weighed)
