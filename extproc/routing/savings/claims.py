"""Claims: what each worker is assumed to hold for one request, weighed.

They combine overlaps and what was sent there. Certain tokens count fully. Uncertain ones, and those
only expected because they were sent, count beyond that with a discount; if both claim the same
tokens, the better claim counts.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from extproc.config.schema import Cost
from extproc.routing.claims.claim_table import Expected
from kvstate.overlap import Overlap, worth_tokens

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
    found = _weighed(held, unsure)
    for number, each in enumerate(expected):
        overlaps = held[number] if held else _NOTHING_HELD
        for name, (speculative, approximate) in each.items():
            known = overlaps.get(name)
            certain = 0 if known is None else known.certain_tokens
            if approximate <= certain:  # the usual case; speculative ones are approximate as well
                continue
            is_live = bool(held) and state(name) == LIVE
            length = speculative if is_live else approximate
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


def _weighed(held: Sequence[Mapping[str, Overlap]], unsure: float) -> dict[str, Claims]:
    """Returns what overlaps are worth, by worker. unsure: the value of an uncertain token."""
    found: dict[str, Claims] = {}
    for overlaps in held:
        for name, overlap in overlaps.items():
            saved = worth_tokens(overlap, unsure)
            if name in found:
                saved += found[name].saved
            found[name] = Claims(saved)
    return found


def _added(before: Claims, more: float, behind: int, *, is_live: bool) -> Claims:
    """Returns the claims with the expected tokens of one more prompt."""
    saved, speculative, approximate = before.saved + more, before.speculative, before.approximate
    if is_live:
        return Claims(saved, speculative + behind, approximate)
    return Claims(saved, speculative, approximate + behind)


def held_tokens(name: str, held: Sequence[Mapping[str, Overlap]]) -> tuple[int, int]:
    """Returns how many tokens a worker certainly holds of prompts, and how many perhaps."""
    certain = uncertain = 0
    for overlaps in held:
        own = overlaps.get(name)
        if own is not None:
            certain += own.certain_tokens
            uncertain += own.uncertain_tokens
    return certain, uncertain
