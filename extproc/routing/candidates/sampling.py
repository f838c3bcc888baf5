"""Samples: a pick in a large fleet compares some random workers, and those that hold the prompt."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from extproc._core import drawn
from extproc.config.schema import Policy

# Default numbers of random workers to compare: a router alone loses nothing with this sample, and
# saves time in a large fleet; for several routers, a smaller one keeps them from picking the same.
SAMPLE_ALONE = 32
SAMPLE_AMONG_ROUTERS = 12


class Chance(Protocol):
    """A source of randomness for picks, such as random.Random."""

    def random(self) -> float:
        """Returns a random number from 0 to below 1."""


def sample_size(policy: Policy, *, is_alone: bool) -> int:
    """Returns how many random workers a pick compares, 0 for all.

    is_alone: whether no other router is reporting its load.
    """
    if policy.sample is not None:
        return policy.sample
    return SAMPLE_ALONE if is_alone else SAMPLE_AMONG_ROUTERS


def sample_of(
    eligible: Sequence[int], holders: Mapping[int, float], count: int, chance: Chance
) -> list[int]:
    """Returns the indices of the workers that a pick compares: `count` random ones first.

    Then come those that hold a part of the prompt, at most `count` that hold the same amount. Two
    routers that pick the best of all workers by slightly outdated figures pick the same one; the
    best of a random sample differs, and among equals a few are enough.

    eligible: more than `count` indices. holders: what each saves, by index; all are eligible.
    """
    chosen = dict.fromkeys(_drawn(eligible, count, chance))
    if len(holders) <= count:
        chosen.update(dict.fromkeys(holders))
        return list(chosen)
    equals: dict[float, list[int]] = {}
    for place, saved in holders.items():
        equals.setdefault(saved, []).append(place)
    for places in equals.values():
        chosen.update(dict.fromkeys(_drawn(places, count, chance)))
    return list(chosen)


def _drawn(places: Sequence[int], count: int, chance: Chance) -> Sequence[int]:
    """Returns `count` different ones of these indices, or all if there are no more."""
    if len(places) <= count:
        return places
    return drawn(places, count, chance.random)
