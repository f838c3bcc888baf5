"""Why a prediction did not come true: the likeliest cause, by what is known of the worker.

The causes, the first that fits:

- `token_mismatch`: the engine counted other prompt tokens than we did, or the self-check found its
  tokens to differ, so it looked for other blocks.
- `feed_not_live`: its feed is not live, so what we hold of it may be old.
- `block_size`: the difference is less than a block, or what was reported is no whole number of
  ours, so the engine counts in other blocks.
- `feed_of_another`: another worker's feed told that this prompt was stored since the pick, and the
  feed of the worker that answered did not: feeds are swapped.
- `other_rank`: less was reported by a worker with several ranks; another one than the one that
  holds the blocks may have answered.
- `evicted`: less was reported, and the worker's feed told that blocks left the cache, or stored the
  prompt again.
- `stored_meanwhile`: more was reported, and the worker's feed told of it since: requests before
  this one in the queue stored the blocks.
- `unknown`: the worker's feed told nothing that explains it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from extproc.accounting.outcome import Outcome
from kvstate.overlap import Overlap

LIVE = "live"


class Circumstances(NamedTuple):
    """What is known of a worker when a request is over.

    state: of its feeds. tokens_differ: whether its tokens were found to differ from ours.
    block_size: in tokens. ranks: how many it has. held: what every worker holds of the request's
    prompt now, by name.
    """

    state: str = LIVE
    tokens_differ: bool = False
    block_size: int = 1
    ranks: int = 1
    held: Mapping[str, Overlap] = {}


def likely_cause(outcome: Outcome, circumstances: Circumstances) -> str:
    """Why predicted and reported tokens differ; "" if they do not, or cannot be compared."""
    error, cached = outcome.error_tokens, outcome.reported.cached_tokens
    if not error or cached is None:
        return ""
    counted = outcome.reported.prompt_tokens
    if circumstances.tokens_differ or counted not in (None, outcome.prompt_tokens):
        return "token_mismatch"
    if circumstances.state != LIVE:
        return "feed_not_live"
    if abs(error) < circumstances.block_size or cached % circumstances.block_size:
        return "block_size"
    return _cause_by_feeds(outcome, circumstances, cached)


def _cause_by_feeds(outcome: Outcome, circumstances: Circumstances, cached: int) -> str:
    """What the feeds told of the prompt since the pick.

    A worker that computes a prompt holds all its whole blocks when it answers.
    """
    worker, held = outcome.worker, circumstances.held
    before, now = _tokens(outcome.held, worker), _tokens(held, worker)
    whole = (outcome.prompt_tokens - 1) // circumstances.block_size * circumstances.block_size
    others = [name for name in held if name != worker and _tokens(held, name) >= whole]
    grown = [name for name in others if _tokens(outcome.held, name) < whole]
    is_over = outcome.predicted_tokens > cached
    if is_over and now < outcome.predicted_tokens:
        return "evicted"
    if not is_over and now >= cached:
        return "stored_meanwhile"
    if now <= before and not outcome.is_moved and (grown or (others and not is_over)):
        return "feed_of_another"
    if is_over and circumstances.ranks > 1:
        return "other_rank"
    return "evicted" if is_over and now >= whole else "unknown"


def _tokens(held: Mapping[str, Overlap], worker: str) -> int:
    overlap = held.get(worker)
    return overlap.certain_tokens + overlap.uncertain_tokens if overlap else 0
