"""Scoring and picking: from what is known of each worker to an order.

A policy gives every eligible worker a rank; the lowest is picked first. Costs are in tokens of
prefill work. This runs for every worker at every request: plain numbers, no objects.
"""

from collections.abc import Callable, Mapping
from operator import mul
from typing import NamedTuple, Protocol

from kvstate.overlap import Overlap
from kvstate.tiers import RESTORE_WEIGHT, Tier

# What a block that may or may not be there is worth, as a share of one that is.
UNCERTAIN_DISCOUNT = 0.5

# What one running request costs a new one, in tokens: its share of every decoding step.
RUNNING_REQUEST_TOKENS = 64

# Endpoints named to Envoy: the best one, and where to retry.
MAX_PICKS = 3

_WEIGHTS = tuple(RESTORE_WEIGHT[tier] for tier in Tier)
_NOTHING = (0, 0, 0)


class Load(NamedTuple):
    """What an endpoint has to do: requests under way, prompt tokens not computed yet."""

    in_flight: int = 0
    backlog_tokens: float = 0.0

    @property
    def tokens(self) -> float:
        """What it costs a new request."""
        in_flight, backlog_tokens = self
        return backlog_tokens + RUNNING_REQUEST_TOKENS * in_flight


def worth_tokens(overlap: Overlap) -> float:
    """Prompt tokens that an overlap saves, a lower tier's at its restore price."""
    block_size, tiers, uncertain = overlap
    if tiers[1:] == _NOTHING and not uncertain:  # as nearly always
        return block_size * tiers[0]
    certain: float = sum(map(mul, _WEIGHTS, tiers))
    return block_size * (certain + UNCERTAIN_DISCOUNT * uncertain)


class Chance(Protocol):
    """The randomness that a pick may use; random.Random is one."""

    def random(self) -> float:
        """A number from 0 to below 1."""


# cost in tokens, requests in flight, turns until it is this worker's, chance -> rank
Rank = tuple[float, float]
Policy = Callable[[float, int, int, Chance], Rank]


def by_cost(cost: float, in_flight: int, turns: int, chance: Chance) -> Rank:  # noqa: ARG001
    """The least work first; ties at random."""
    return cost, chance.random()


def by_least_request(cost: float, in_flight: int, turns: int, chance: Chance) -> Rank:  # noqa: ARG001
    """The fewest requests in flight first; ties at random."""
    return in_flight, chance.random()


def by_turn(cost: float, in_flight: int, turns: int, chance: Chance) -> Rank:  # noqa: ARG001
    """One after the other."""
    return turns, 0.0


def by_chance(cost: float, in_flight: int, turns: int, chance: Chance) -> Rank:  # noqa: ARG001
    """Any order."""
    return chance.random(), 0.0


POLICIES: Mapping[str, Policy] = {
    "cost": by_cost,
    "least_request": by_least_request,
    "round_robin": by_turn,
    "random": by_chance,
}
