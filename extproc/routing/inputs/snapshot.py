"""The snapshot: the fleet as it is for one request."""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from extproc._core import LoadColumns
from extproc.config.schema import Policy
from extproc.routing.candidates.eligibility import Candidate, Roster
from extproc.routing.candidates.ranks import Ranks
from extproc.routing.claims.claim_table import ClaimTable, Holdings
from extproc.routing.claims.homes import Homes
from extproc.routing.load.loads import Load
from kvstate.overlap import Overlap


def _always_live(_: str) -> str:
    return "live"


def one_token(_: str) -> int:
    """Returns 1: without a known block size, any length counts."""
    return 1


class Snapshot(msgspec.Struct, frozen=True):
    """The fleet as it is for one request: all that a decision depends on besides these two."""

    # All workers of the model.
    workers: Sequence[Candidate]
    # For each prompt, the overlaps of the workers that hold a part of it, by name.
    overlaps: Sequence[Mapping[str, Overlap]]
    # Returns the load of an endpoint at a time.
    load: Callable[[str, float], Load]
    # The name of the policy.
    policy: str
    # Decisions so far for this model.
    turn: int
    # The configured rules of picking.
    rules: Policy = Policy()
    # The record of earlier requests.
    claims: ClaimTable | None = None
    # Returns the state of a worker's feeds, by name.
    state: Callable[[str], str] = _always_live
    # Endpoints that get no requests, and why.
    unfit: Mapping[str, str] = {}
    # Failing endpoints, and why; picked only if no other is left.
    ejected: Mapping[str, str] = {}
    # Endpoints whose last answer failed or came from elsewhere; they compute prompts for others
    # only if all are doubted, and are no measure of how few conversations a worker may have.
    doubted: Collection[str] = ()
    # The workers' ranks, if requests may name one.
    ranks: Ranks | None = None
    # Returns the block size of a worker's cache in tokens, by name.
    block_size: Callable[[str], int] = one_token
    # How many random workers are compared, besides those that hold a part of the prompt; 0 compares
    # all.
    sample: int = 0
    # The workers' roster, None if not made yet.
    roster: Roster | None = None
    # The workers of conversations.
    homes: Homes | None = None
    # The record of what was sent to each worker, in their order; needed with homes.
    records: Sequence[Holdings] = ()
    # Returns the loads of several workers at a time; None to ask `load` for each.
    columns: Callable[[Sequence[Candidate], float], LoadColumns] | None = None
    # Whether two workers may share the request: it is steered, and its body can say so.
    may_split: bool = True
