from random import Random

import pytest

from extproc.pick import POLICIES, RUNNING_REQUEST_TOKENS, Load, worth_tokens
from kvstate.overlap import Overlap


def test_what_is_on_the_device_saves_all_of_it() -> None:
    assert worth_tokens(Overlap(16, (4, 0, 0, 0))) == 64


def test_lower_tiers_save_less() -> None:
    saved = [
        worth_tokens(Overlap(10, tiers)) for tiers in ((0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))
    ]
    assert saved == [8, 4, 2]


def test_uncertain_blocks_save_half() -> None:
    assert worth_tokens(Overlap(10, (1, 0, 0, 0), uncertain=2)) == 20


def test_load_costs_its_backlog_and_something_for_each_request() -> None:
    assert Load().tokens == 0
    assert Load(2, 30.0).tokens == 30 + 2 * RUNNING_REQUEST_TOKENS


def order(policy: str, *workers: tuple[float, int, int]) -> list[int]:
    """Positions of workers given as (cost, in flight, turns), best first."""
    rng = Random(0)
    ranked = [(POLICIES[policy](*worker, rng), at) for at, worker in enumerate(workers)]
    return [at for _, at in sorted(ranked)]


def test_each_policy_looks_at_its_own() -> None:
    workers = ((5.0, 1, 2), (3.0, 2, 0), (4.0, 0, 1))
    assert order("cost", *workers) == [1, 2, 0]
    assert order("least_request", *workers) == [2, 0, 1]
    assert order("round_robin", *workers) == [1, 2, 0]


@pytest.mark.parametrize("policy", ["cost", "least_request", "random"])
def test_ties_are_spread_by_chance(policy: str) -> None:
    rng = Random(1)
    firsts = [min((POLICIES[policy](1.0, 0, 0, rng), at) for at in range(3))[1] for _ in range(300)]
    assert all(firsts.count(at) > 60 for at in range(3))
