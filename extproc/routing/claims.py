"""Claims: what each worker is assumed to hold for one request, weighed.

They combine overlaps and what was sent there. Certain tokens count fully. Uncertain ones, and those
only expected because they were sent, count beyond that with a discount; if both claim the same
tokens, the better claim counts.
"""

from collections.abc import Callable, Mapping, Sequence

from extproc.base.structs import Light
from extproc.config.schema import Cost
from extproc.routing.claim_table import Expected
from kvstate.overlap import Overlap, worth_tokens

# In this state a feed is complete: blocks missing in the index are not cached, or on their way.
LIVE = "live"


class Claims(Light, frozen=True, gc=False):
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
    found: dict[str, Claims] = {}
    unsure = cost.uncertain_percent / 100
    for overlaps in held:
        for name, overlap in overlaps.items():
            worth = worth_tokens(overlap, unsure)
            found[name] = Claims(worth + found[name].saved if name in found else worth)
    for number, each in enumerate(expected):
        overlaps = held[number] if held else _NOTHING_HELD
        for name, lengths in each.items():
            known = overlaps.get(name)
            certain = 0 if known is None else known.certain_tokens
            if max(lengths) <= certain:  # the usual case, whatever the state is
                continue
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
