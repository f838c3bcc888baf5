"""Scoring and picking: from what is known of each candidate to an order of endpoints.

A policy is one function: it gets the scored candidates that are eligible and returns them in the
order of preference. All costs are in tokens of prefill work.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstate.overlap import Overlap
from kvstate.tiers import RESTORE_WEIGHT, Tier

# What a block that may or may not be there is worth, as a share of one that is.
UNCERTAIN_DISCOUNT = 0.5

# What one running request costs a new one, in tokens: its share of every decoding step.
RUNNING_REQUEST_TOKENS = 64

# Endpoints named to Envoy: the best one, and where to retry.
MAX_PICKS = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of one worker when a request is to be placed.

    endpoint: ip:port; its configured name where it could not be resolved yet.
    overlaps: one for each prompt of the request that it holds something of.
    excluded: why it cannot be picked, "" if it can.
    """

    endpoint: str
    state: str
    in_flight: int
    backlog_tokens: float
    overlaps: Sequence[Overlap] = ()
    excluded: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate and what the request would cost there, in tokens."""

    candidate: Candidate
    uncached_tokens: float
    cost: float

    @property
    def certain_tokens(self) -> int:
        """Prompt tokens that it certainly holds."""
        return sum(overlap.certain_tokens for overlap in self.candidate.overlaps)

    @property
    def uncertain_tokens(self) -> int:
        """Prompt tokens that it may hold."""
        return sum(overlap.uncertain_tokens for overlap in self.candidate.overlaps)

    @property
    def blocks_by_tier(self) -> dict[str, int]:
        """Certain blocks on each tier."""
        return {
            tier.name.lower(): sum(overlap.tiers[tier] for overlap in self.candidate.overlaps)
            for tier in Tier
        }


def score(candidate: Candidate, prompt_tokens: int) -> Scored:
    """What a prompt of so many tokens costs there: what is not cached, and what is ahead of it."""
    uncached = max(0.0, prompt_tokens - sum(map(_worth_tokens, candidate.overlaps)))
    load = candidate.backlog_tokens + RUNNING_REQUEST_TOKENS * candidate.in_flight
    return Scored(candidate, uncached, uncached + load)


def _worth_tokens(overlap: Overlap) -> float:
    certain = sum(RESTORE_WEIGHT[tier] * overlap.tiers[tier] for tier in Tier)
    return (certain + UNCERTAIN_DISCOUNT * overlap.uncertain) * overlap.block_size


class Chance(Protocol):
    """The randomness that a pick may use; random.Random is one."""

    def random(self) -> float:
        """A number from 0 to below 1."""


Policy = Callable[[Sequence[Scored], int, Chance], list[Scored]]


def by_cost(scored: Sequence[Scored], turn: int, rng: Chance) -> list[Scored]:  # noqa: ARG001
    """The least work first; ties at random."""
    return sorted(scored, key=lambda one: (one.cost, rng.random()))


def by_least_request(scored: Sequence[Scored], turn: int, rng: Chance) -> list[Scored]:  # noqa: ARG001
    """The fewest requests in flight first; ties at random."""
    return sorted(scored, key=lambda one: (one.candidate.in_flight, rng.random()))


def by_turn(scored: Sequence[Scored], turn: int, rng: Chance) -> list[Scored]:  # noqa: ARG001
    """One after the other."""
    first = turn % len(scored)
    return [*scored[first:], *scored[:first]]


def by_chance(scored: Sequence[Scored], turn: int, rng: Chance) -> list[Scored]:  # noqa: ARG001
    """Any order."""
    return sorted(scored, key=lambda _: rng.random())


POLICIES: Mapping[str, Policy] = {
    "cost": by_cost,
    "least_request": by_least_request,
    "round_robin": by_turn,
    "random": by_chance,
}
