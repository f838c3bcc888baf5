"""Scoring: what it costs to send a request to a worker, in tokens of prefill work.

    cost =   uncached prompt tokens x affinity
           + prompt tokens still queued there
           + running x requests in flight there

An uncached token makes this request wait on an idle fleet, and others besides on a busy one: so
affinity is 1 there and grows with the utilization of the fleet, as waiting does.

This runs for every worker at every request: plain numbers, no objects.
"""

from operator import mul
from typing import NamedTuple, Protocol

from kvstate.overlap import Overlap
from kvstate.tiers import RESTORE_WEIGHT, Tier

# From this utilization on, the wait of those who come later counts in full.
FULL_WEIGHT_UTILIZATION = 0.25

_TIER_WEIGHTS = tuple(RESTORE_WEIGHT[tier] for tier in Tier)


class Weights(NamedTuple):
    """What a cost is made of; benchmarks/routing.py is where these come from.

    affinity: tokens of waiting that one uncached token is worth on an idle fleet. busy_affinity:
    how many more on one that is half busy or more. running: tokens that one request in flight costs
    a new one, by its share of every step. uncertain, speculative, approximate: what a claimed token
    saves, as a share of a certain one.
    """

    affinity: float = 1.0
    busy_affinity: float = 1.0
    running: float = 128.0
    uncertain: float = 0.5
    speculative: float = 0.9
    approximate: float = 0.9


DEFAULT_WEIGHTS = Weights()


class Chance(Protocol):
    """The randomness that a pick may use; random.Random is one."""

    def random(self) -> float:
        """A number from 0 to below 1."""


def worth_tokens(overlap: Overlap, uncertain_weight: float = DEFAULT_WEIGHTS.uncertain) -> float:
    """Prompt tokens that an overlap saves, a lower tier's at its restore price."""
    block_size, tiers, uncertain, _ = overlap
    device, host, disk, remote = tiers
    if not (host or disk or remote or uncertain):  # as nearly always
        return block_size * device
    certain: float = sum(map(mul, _TIER_WEIGHTS, tiers))
    return block_size * (certain + uncertain_weight * uncertain)


def affinity_of(weights: Weights, utilization: float) -> float:
    """The weight of an uncached token.

    utilization: of the fleet, the mean of its workers'. What is added by each token to the wait of
    all who come later is in proportion to u / (1 - u); bounded, since u is a rough estimate, and
    less than that where u is low: one burst makes no busy fleet.
    """
    if utilization >= 0.5:  # noqa: PLR2004 - where u / (1 - u) is 1
        return weights.affinity + weights.busy_affinity
    waiting = utilization / (1.0 - utilization)
    if utilization < FULL_WEIGHT_UTILIZATION:
        waiting *= utilization / FULL_WEIGHT_UTILIZATION
    return weights.affinity + weights.busy_affinity * waiting
