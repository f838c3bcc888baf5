"""Savings: how many tokens of a request each worker would not have to compute."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from extproc.requests.outline import BYTES_PER_TOKEN
from extproc.requests.request import RoutingRequest
from extproc.routing.claims.claim_table import ClaimTable, Expected
from extproc.routing.claims.marks import Marks
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.savings.belonging import Belonging, belonging_of
from extproc.routing.savings.claims import NO_CLAIMS, Claims, claims_of

# The rest of a longer body that is not read is ignored: such bodies mostly carry media, which are
# few tokens.
MAX_UNREAD_BYTES = 128 * 1024


class Savings(msgspec.Struct, frozen=True, gc=False):
    """What workers are assumed to hold of a request, and how it is weighed. Workers are by name."""

    # The tokens of its keyed prompts.
    prompt_tokens: int
    # The same, or an estimate if they are not known.
    weighed_tokens: float
    # Each prompt's marks.
    marks: Sequence[Marks]
    # What each worker holds, or was sent.
    claims: Mapping[str, Claims]
    # Which workers its conversation prefers.
    belonging: Belonging
    # The tokens by which each worker is preferred: claimed, or credited to the conversation.
    saved: Mapping[str, float]

    def claims_on(self, worker: str) -> Claims:
        """Returns what a worker is assumed to hold of the request."""
        return self.claims.get(worker, NO_CLAIMS)


def savings_of(
    request: RoutingRequest, query: Query, snapshot: Snapshot, eligible: Sequence[int], now: float
) -> Savings:
    """Returns what workers would save of a request.

    eligible: the indices of those that may answer. now: seconds of the loads' clock.
    """
    prompts, state = query.prompts, snapshot.state
    one = len(prompts) == 1  # the usual case
    prompt_tokens = len(prompts[0].tokens) if one else sum([len(each.tokens) for each in prompts])
    weighed = _weighed(query, prompt_tokens)
    if query.media is not None and not query.media.is_whole:
        state = _unknown  # feeds show nothing of what is behind
    marks = _marks(query, snapshot.claims)
    sent = _expected(snapshot, marks, now) if query.reads_cache else ()
    claims = _claims(snapshot, sent, state) if query.reads_cache else {}
    saved = {name: one.saved for name, one in claims.items()}
    belonging = belonging_of(request, query, marks, eligible, snapshot, sent, saved, weighed, now)
    for name, more in belonging.credit.items():
        saved[name] = max(saved.get(name, 0.0), more)
    return Savings(prompt_tokens, weighed, marks, claims, belonging, saved)


def _unknown(_: str) -> str:
    """Returns a state in which what was sent to a worker counts."""
    return ""


def _weighed(query: Query, prompt_tokens: int) -> float:
    """Returns the tokens of a query, estimated if its prompts are not known."""
    if query.media is not None:
        return query.media.weighed_tokens
    if query.prompts:
        return float(prompt_tokens)
    if query.outline is not None:
        return query.outline.tokens
    return min(query.unread_bytes, MAX_UNREAD_BYTES) / BYTES_PER_TOKEN


def _marks(query: Query, sent: ClaimTable | None) -> Sequence[Marks]:
    if sent is None:
        return ()
    if query.outline is not None:
        if query.salt == "":
            return ()
        return (sent.text_marks(query.model, query.outline, query.lora, query.salt),)
    return list(map(sent.marks, query.prompts))


def _expected(
    snapshot: Snapshot, marks: Sequence[Marks], now: float
) -> Sequence[Mapping[str, Expected]]:
    """Returns what was sent of each prompt to each worker."""
    sent = snapshot.claims
    return [sent.expected(one, now) for one in marks] if sent is not None else ()


def _claims(
    snapshot: Snapshot, sent: Sequence[Mapping[str, Expected]], state: Callable[[str], str]
) -> Mapping[str, Claims]:
    return claims_of(snapshot.overlaps, sent, state, snapshot.rules.cost, snapshot.block_size)
