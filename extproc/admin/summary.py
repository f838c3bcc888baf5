"""A decision in the list of decisions, and a prefix in the map of prefixes."""

from collections.abc import Mapping
from typing import Any

from extproc.admin.prefixes import LEADING_TOKENS, Prefix
from extproc.admin.recent import Kept
from extproc.picking.claims import NO_CLAIMS
from extproc.picking.explain import why
from kvstate.overlap import Overlap
from kvstate.tiers import Tier


def summary(kept: Kept) -> dict[str, Any]:
    """One entry of GET /decisions: nothing of the prompt but its length."""
    decision = kept.decision
    claimed = decision.claims.get(decision.worker, NO_CLAIMS)
    return {
        "id": kept.number,
        "at": round(kept.at, 3),
        "model": decision.model,
        "prompt_tokens": decision.prompt_tokens,
        "weighed_tokens": round(decision.weighed_tokens),
        "pick": list(decision.pick),
        "worker": decision.worker,
        "served": kept.served,
        "policy": decision.policy,
        "verdict": decision.verdict.value,
        "reason": decision.reason,
        "why": why(decision),
        "predicted_tokens": decision.certain_tokens,
        "uncertain_tokens": decision.uncertain_tokens,
        "speculative_tokens": claimed.speculative,
        "approximate_tokens": claimed.approximate,
        "candidates": len(decision.workers),
    }


def spread(prefix: Prefix, overlaps: Mapping[str, Overlap], workers: int) -> dict[str, Any]:
    """One entry of GET /prefixes: the workers that hold some of a prefix, the most first.

    workers: how many are told at the most.
    """
    holders = sorted(overlaps.items(), key=lambda one: one[1].rank_order, reverse=True)
    return {
        "key": prefix.key,
        "model": prefix.prompt.model,
        "lora": prefix.prompt.lora,
        "salted": prefix.prompt.salt is not None,
        "tokens": prefix.tokens,
        "cut": prefix.tokens >= LEADING_TOKENS,
        "requests": prefix.requests,
        "held_by": len(holders),
        "workers": [_holder(name, overlap) for name, overlap in holders[:workers]],
    }


def _holder(name: str, overlap: Overlap) -> dict[str, Any]:
    return {
        "name": name,
        "tokens": overlap.certain_tokens,
        "uncertain_tokens": overlap.uncertain_tokens,
        "blocks_by_tier": {tier.name.lower(): overlap.tiers[tier] for tier in Tier},
    }
