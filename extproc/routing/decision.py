"""A decision: where a request goes, and what that was based on."""

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from extproc.requests.request_class import RequestClass
from extproc.requests.tenant_salt import Tenant
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.candidates.pins import PinnedRank
from extproc.routing.claims.marks import Marks
from extproc.routing.cost.fetch import Fetch
from extproc.routing.cost.spread import Rows
from extproc.routing.handing import Handing
from extproc.routing.inputs.query import Media
from extproc.routing.load.loads import Load
from extproc.routing.savings.belonging import Belonging
from extproc.routing.savings.claims import NO_CLAIMS, Claims
from kvstate.overlap import Overlap

OVER_LIMIT = "over its limit of requests"
# Why a request is refused that waited for room in the caches.
NO_ROOM = "no_room"
# Why a request is left to the proxy.
FINDS_MODEL = "the model is not known here, so the proxy chooses"
CALLS_NO_MODEL = "it calls no model, so the proxy chooses"


class Verdict(Enum):
    """The outcome of a decision.

    STEER: the request goes to the pick. NO_OVERRIDE: the proxy chooses. UNAVAILABLE: 503. SHED:
    429, every worker is over its limit. NO_ROOM: 429, it waited for room in the caches for as long
    as it may.
    """

    STEER = "steer"
    NO_OVERRIDE = "no_override"
    UNAVAILABLE = "unavailable"
    SHED = "shed"
    NO_ROOM = "no_room"


class Split(msgspec.Struct, frozen=True):
    """Whether another worker computes the prompt for the one that answers.

    prefill: the decision among prefill workers, None if the answering worker computes the prompt.
    reason: the reason in words. cost_alone, cost_split: the cost in tokens of computing it there or
    elsewhere, None if not compared. outcome: the reason as the word by which it is counted.
    """

    prefill: "Decision | None"
    reason: str
    cost_alone: float | None = None
    cost_split: float | None = None
    outcome: str = ""


class PullSource(NamedTuple):
    """Another worker to pull a part of the prompt from.

    endpoint: the worker's; port: where it hands over. tokens: how many more it holds than the pick.
    """

    endpoint: str
    port: int
    tokens: int


NO_FETCHES: Mapping[str, Fetch] = MappingProxyType({})


class ChargeColumn(NamedTuple):
    """What one term added to the costs.

    tokens: a column, of prefill work; None for workers that were not compared. fetches: what
    workers would fetch for it, by name.
    """

    tokens: Rows[float | None]
    fetches: Mapping[str, Fetch]


class Basis(msgspec.Struct, frozen=True):
    """What a decision was based on, for those who explain, count and account for it.

    Columns have a value for each worker, in the order of `workers`.
    """

    # The name of the policy.
    policy: str
    # Tokens of the keyed prompts.
    prompt_tokens: int
    # The same, or an estimate from the text.
    weighed_tokens: float
    # What the first pick certainly holds of them, and what it perhaps holds beyond.
    certain_tokens: int
    uncertain_tokens: int
    # All candidates.
    workers: Sequence[Candidate]
    # A column: why each is left out, "" if it is not.
    excluded: Sequence[str]
    # Columns: the load and the cost of each, None if it was not compared.
    loads: Rows[Load | None]
    costs: Rows[float | None]
    # Indices of the workers that were compared, None for all.
    sampled: Sequence[int] | None
    # The overlaps of each prompt, by the worker's name.
    overlaps: Sequence[Mapping[str, Overlap]]
    # The weighed overlaps, by the worker's name.
    claims: Mapping[str, Claims]
    # Which workers the request's conversation prefers.
    belonging: Belonging
    # What each term added to the costs, by its name; only of terms that concern the request.
    charges: Mapping[str, ChargeColumn]
    # What compared workers could fetch instead of computing it, by name.
    fetches: Mapping[str, Fetch]
    # The weights of an uncached token, and of a request in flight.
    affinity: float
    running: float
    # The media of the only prompt, None without any.
    media: Media | None = None

    def charged(self, term: str, at: int) -> float:
        """Returns what a term added to the cost of a worker, by its place; 0 if it did not."""
        charged = self.charges.get(term)
        return 0.0 if charged is None else charged.tokens[at] or 0.0

    def worker_at(self, endpoint: str) -> str:
        """Returns the name of the worker at an endpoint, "" for an unknown endpoint."""
        for worker in self.workers:
            if worker.endpoint == endpoint:
                return worker.name
        return ""

    def claims_on(self, worker: str) -> Claims:
        """Returns what a worker is assumed to hold of the request."""
        return self.claims.get(worker, NO_CLAIMS)


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes: what serving it needs. `basis` says why it goes there."""

    # Whether it goes anywhere at all.
    verdict: Verdict
    # The configured model, None if unknown.
    model: str | None
    # ip:port, best first; empty if the proxy chooses.
    pick: tuple[str, ...]
    # The name of the first, "" if there is none.
    worker: str
    # Overlap, or why the pick was made without it; docs/metrics.md lists them.
    reason: str
    # The tokens that the first pick has to compute.
    uncached_tokens: float
    # Each prompt's marks, recorded for the worker that gets it.
    marks: Sequence[Marks]
    basis: Basis
    # The data-parallel rank that the request should name, None for none.
    rank: PinnedRank | None = None
    # Whether the proxy gets the pick; if not, it is only noted, and the proxy chooses.
    is_steered: bool = True
    # Whether another worker computes the prompt; None if every worker takes whole requests.
    split: Split | None = None
    # The worker from which the pick should pull a part of the prompt, which is then left out of
    # uncached_tokens; None for none.
    source: PullSource | None = None
    # The class of the request, None without classes.
    of_class: RequestClass | None = None
    # What becomes of the ids of its prompt, None if no feature hands any over.
    handing: Handing | None = None
    # Whose request it is, for the recorder and for responses that others continue; None if nobody
    # asks.
    tenant: Tenant | None = None
    # How long it waited for room in the caches before.
    held_seconds: float = 0.0

    @property
    def prefill(self) -> "Decision | None":
        """The decision for the prefill worker; None if the answering worker computes."""
        return None if self.split is None else self.split.prefill


def without_room(decision: Decision) -> Decision:
    """Returns a decision as it is if its request waited for room in vain."""
    return msgspec.structs.replace(
        decision,
        verdict=Verdict.NO_ROOM,
        pick=(),
        worker="",
        reason=NO_ROOM,
        split=None,
        handing=None,
    )
