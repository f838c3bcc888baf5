"""What is claimed of each worker for one request: overlaps, and what was sent there, weighed.

What is certain counts fully. What the index is not sure of, and what we only expect because we sent
it, counts behind that, with a discount; where both claim something the better claim counts.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from extproc.picking.pick import Weights, worth_tokens
from extproc.picking.sent import Expected
from kvstate.overlap import Overlap

# The state in which a feed tells all of a prompt whose tokens are known: what is missing from the
# index is not there, or on its way.
LIVE = "live"


class Claims(msgspec.Struct, frozen=True, gc=False):
    """Of one worker, in tokens, over all prompts of the request.

    saved: what need not be computed, by the weights. speculative, approximate: expected there
    behind what is certain, where a feed tells what is there now, or where none does.
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
    weights: Weights,
    block_size: Callable[[str], int],
) -> dict[str, Claims]:
    """The claims of every worker that has any, by name.

    held, expected: one for each prompt; expected may be left out, and alone be there for a text.
    state: of a worker's feeds, by its name. Where none tells what a worker holds of these prompts,
    whatever the reason, all that was sent there counts. block_size: of a worker's cache, in tokens.
    """
    found: dict[str, Claims] = {}
    for overlaps in held:
        for name, overlap in overlaps.items():
            worth = worth_tokens(overlap, weights.uncertain)
            if name in found:
                worth += found[name].saved
            found[name] = Claims(worth)
    for number, each in enumerate(expected):
        overlaps = held[number] if held else _NOTHING_HELD
        for name, lengths in each.items():
            known = overlaps.get(name)
            certain = 0 if known is None else known.certain_tokens
            if max(lengths) <= certain:  # as mostly, whatever the state is
                continue
            is_live = bool(held) and state(name) == LIVE
            length = lengths[0] if is_live else lengths[1]
            if held:  # only whole blocks are kept
                length -= length % block_size(name)
            if length <= certain:
                continue
            behind = length - certain
            more = behind * (weights.speculative if is_live else weights.approximate)
            if known is not None:
                more = max(0.0, more - weights.uncertain * known.uncertain_tokens)
            found[name] = _added(found.get(name, NO_CLAIMS), more, behind, is_live=is_live)
    return found


def _added(before: Claims, more: float, behind: int, *, is_live: bool) -> Claims:
    """The claims with what is expected of one more prompt."""
    saved, speculative, approximate = before.saved + more, before.speculative, before.approximate
    if is_live:
        return Claims(saved, speculative + behind, approximate)
    return Claims(saved, speculative, approximate + behind)
