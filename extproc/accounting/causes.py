"""Why a prediction did not come true: the likeliest cause, by what is known of the worker.

The causes, the first that fits:

- `token_mismatch`: the engine counted other prompt tokens than we did, or the self-check found its
  tokens to differ, so it looked for other blocks.
- `feed_not_live`: its feed is not live, so what we hold of it may be old.
- `block_size`: the difference is less than a block, or what was reported is no whole number of
  ours, so the engine counts in other blocks.
- `evicted`: less was reported; blocks left the cache between the pick and the prefill.
- `stored_meanwhile`: more was reported; requests before it in the queue stored blocks.
"""

from typing import NamedTuple

from extproc.accounting.outcome import Outcome

LIVE = "live"


class Circumstances(NamedTuple):
    """What is known of a worker when a request is over.

    state: of its feeds. tokens_differ: whether its tokens were found to differ from ours.
    block_size: in tokens.
    """

    state: str = LIVE
    tokens_differ: bool = False
    block_size: int = 1


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
    return "evicted" if error > 0 else "stored_meanwhile"
