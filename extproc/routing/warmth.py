"""What a request would find at a fleet, in figures alone: no worker is named, and no other tenant.

Who chooses among fleets compares the seconds until the first token: of the queue, and of the part
of the prompt that is not held. The figures are those by which the decision was made.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from extproc.routing.decision import OVER_LIMIT, Basis, Decision
from extproc.routing.inputs.query import Query
from extproc.routing.load.loads import Load
from extproc.routing.savings.claims import held_tokens
from kvstate.overlap import Tier


class Warmth(msgspec.Struct, frozen=True):
    """What one worker is expected to hold of a prompt, and how long the prompt would take there.

    tiers: tokens certainly held, by the best tier of each block. uncertain: tokens that its events
    leave open. speculative, approximate: tokens that were sent there and are not announced, with a
    live feed and without one. saved: tokens that need not be computed, all of these weighed. share:
    that of the prompt, 0 to 1. queue_seconds: until it has computed what was sent there before.
    prefill_seconds: for the rest of the prompt, after that.
    """

    tiers: dict[str, int]
    uncertain: int
    speculative: int
    approximate: int
    saved: float
    share: float
    queue_seconds: float
    prefill_seconds: float

    def as_json(self) -> dict[str, Any]:
        """Returns the entry of a worker in the answer of POST /probe."""
        return {
            "certain_tokens": self.tiers,
            "uncertain_tokens": self.uncertain,
            "speculative_tokens": self.speculative,
            "approximate_tokens": self.approximate,
            "share": round(self.share, 4),
            "queue_seconds": round(self.queue_seconds, 3),
            "prefill_seconds": round(self.prefill_seconds, 3),
        }


def warm_share(decision: Decision) -> float:
    """Returns the share of a prompt that who computes it is expected to hold, 0 to 1."""
    computes = decision.prefill or decision
    basis = computes.basis
    saved = basis.claims_on(computes.worker).saved
    return min(1.0, saved / basis.weighed_tokens) if basis.weighed_tokens else 0.0


def warmth_as_json(
    decision: Decision, query: Query, load: Callable[[str], Load], tokens_per_second: float
) -> dict[str, Any]:
    """Returns what a model's fleet holds of a prompt, as POST /probe answers it.

    load: returns the load of an endpoint now, for workers that were not compared.
    tokens_per_second: a worker's, as configured.
    """
    computes = decision.prefill or decision  # the others have no part in the prompt
    basis = computes.basis
    places = {worker.name: at for at, worker in enumerate(basis.workers)}
    pick = places.get(computes.worker)
    best = max(_able_holders(basis, places), key=lambda at: _order(basis, at), default=None)

    def shown(at: int | None) -> dict[str, Any] | None:
        return None if at is None else warmth_of(basis, at, load, tokens_per_second).as_json()

    return {
        "model": decision.model,
        "prompt_tokens": round(basis.weighed_tokens),
        "keyed": bool(query.prompts),
        "reason": query.reason,
        "verdict": decision.verdict.value,
        "pick": shown(pick),
        "best": shown(best) if best != pick and _is_warmer(basis, best, pick) else None,
    }


def warmth_of(
    basis: Basis, at: int, load: Callable[[str], Load], tokens_per_second: float
) -> Warmth:
    """Returns what a worker of a decision holds of its prompt. at: its place among the workers."""
    worker = basis.workers[at]
    known = basis.loads[at] or load(worker.endpoint)
    overlaps = [each[worker.name] for each in basis.overlaps if worker.name in each]
    claimed, whole = basis.claims_on(worker.name), basis.weighed_tokens
    seconds = known.slowness / tokens_per_second
    return Warmth(
        tiers={
            tier.name.lower(): sum([one.tiers[tier] * one.block_size for one in overlaps])
            for tier in Tier
        },
        uncertain=held_tokens(worker.name, basis.overlaps)[1],
        speculative=claimed.speculative,
        approximate=claimed.approximate,
        saved=claimed.saved,
        share=min(1.0, claimed.saved / whole) if whole else 0.0,
        queue_seconds=seconds * known.backlog_tokens,
        prefill_seconds=seconds * max(0.0, whole - claimed.saved),
    )


def _able_holders(basis: Basis, places: dict[str, int]) -> Iterator[int]:
    """Yields the places of the workers that hold some of a prompt, and may take a request."""
    for name in basis.claims:
        at = places.get(name)
        if at is not None and basis.excluded[at] in ("", OVER_LIMIT):
            yield at


def _order(basis: Basis, at: int) -> float:
    return basis.claims_on(basis.workers[at].name).saved


def _is_warmer(basis: Basis, one: int | None, other: int | None) -> bool:
    """Returns whether a worker is expected to hold more of a prompt than another, by places."""
    if one is None:
        return False
    return other is None or _order(basis, one) > _order(basis, other)
