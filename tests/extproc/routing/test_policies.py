from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc._core import LoadColumns, lowest
from extproc.config.policies import POLICIES, PolicyInput
from extproc.config.schema import Cost, Policy
from extproc.config.sections import CacheAware, PrefixCacheSettings
from extproc.routing.candidates.sampling import (
    SAMPLE_ALONE,
    SAMPLE_AMONG_ROUTERS,
    sample_of,
    sample_size,
)
from extproc.routing.load.endpoint_load import EndpointLoad
from extproc.routing.load.loads import Gauges, Load, Loads
from extproc.routing.savings.sessions import session_credit


def columns(*workers: tuple[float, float, float], **fields: Any) -> PolicyInput:
    """Workers given as (cost, saved, in flight); fields of the input, or settings of a policy."""
    costs, saved, in_flight = zip(*workers, strict=True) if workers else ((), (), ())
    defaults: dict[str, Any] = {"prompt_tokens": 100.0, "turn": 0}
    rules = {name: fields.pop(name) for name in [*fields] if name in Policy.__slots__}
    return PolicyInput(
        rules=Policy(**rules),
        endpoints=lambda: [f"10.0.0.{at}:1" for at, _ in enumerate(workers)],
        costs=list(costs),
        saved=lambda: saved,
        in_flight=lambda: list(in_flight),
        **(defaults | fields),
    )


def order(policy: str, *workers: tuple[float, float, float], **fields: Any) -> Sequence[int]:
    """Positions of the workers, best first."""
    chance = fields.pop("chance", Random(0))
    count = fields.pop("count", 3)
    return lowest(POLICIES[policy].rank(columns(*workers, **fields)), count, chance.random)


def test_policy_orders_workers_by_its_own_measure() -> None:
    workers = ((5.0, 0.0, 1), (3.0, 0.0, 2), (4.0, 90.0, 0))
    assert order("cost", *workers) == [1, 2, 0]
    assert order("least_request", *workers) == [2, 0, 1]
    assert order("round_robin", *workers) == [0, 1, 2]
    assert order("round_robin", *workers, turn=1) == [1, 2, 0]


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"round_robin"}))
def test_ties_are_broken_by_chance(policy: str) -> None:
    rng = Random(1)
    worker = (1.0, 50.0, 1)
    firsts = [order(policy, worker, worker, worker, chance=rng)[0] for _ in range(300)]
    assert all(firsts.count(at) > 60 for at in range(3))


def test_lowest_orders_only_as_many_workers_as_are_named() -> None:
    workers = [(float(cost), 0.0, 0.0) for cost in (9, 7, 8, 5, 6)]
    assert order("cost", *workers) == [3, 4, 1]
    assert order("cost", *workers, count=1) == [3]
    assert order("cost", *workers, count=8) == [3, 4, 1, 2, 0]


def test_lowest_gives_equal_chances_to_ties_behind_the_named_workers() -> None:
    workers = [(float(cost), 0.0, 0.0) for cost in (1, 2, 3, 3)]
    rng = Random(1)
    thirds = [order("cost", *workers, chance=rng)[2] for _ in range(100)]
    assert all(thirds.count(at) > 20 for at in (2, 3))


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_accepts_a_fleet_without_workers(policy: str) -> None:
    assert order(policy) == []


def test_cache_aware_takes_the_longest_match_above_its_threshold() -> None:
    assert order("cache_aware", (0, 0, 0), (0, 31, 9), (0, 40, 20)) == [2, 1, 0]
    assert order("cache_aware", (0, 0, 0), (0, 20, 9), (0, 30, 20)) == [0, 1, 2]


def test_cache_aware_compares_load_alone_beyond_both_thresholds() -> None:
    knobs = CacheAware(balance_abs_requests=10, balance_rel_percent=150)
    assert order("cache_aware", (0, 99, 31), (0, 0, 20), cache_aware=knobs) == [1, 0]
    assert order("cache_aware", (0, 99, 31), (0, 0, 21), cache_aware=knobs) == [0, 1]
    assert order("cache_aware", (0, 99, 61), (0, 0, 50), cache_aware=knobs) == [0, 1]


def test_prefix_cache_takes_the_longest_match_that_is_not_busier_than_most() -> None:
    assert order("prefix_cache", (0, 20, 1), (0, 50, 2), (0, 0, 1)) == [0, 2, 1]
    wide = PrefixCacheSettings(sigma_percent=200)
    assert order("prefix_cache", (0, 20, 1), (0, 50, 2), (0, 0, 1), prefix_cache=wide)[0] == 1


def test_prefix_cache_compares_load_alone_when_the_fleet_is_unbalanced() -> None:
    wide = PrefixCacheSettings(imbalance_requests=8, sigma_percent=900)
    assert order("prefix_cache", (0, 99, 9), (0, 0, 0), prefix_cache=wide) == [1, 0]
    assert order("prefix_cache", (0, 99, 8), (0, 0, 0), prefix_cache=wide) == [0, 1]


@pytest.mark.parametrize(
    ("utilization", "affinity"),
    [
        (0.0, 1.5),
        (0.2, 1.9),
        (0.25, 2.0 / 3.0 + 1.5),
        (0.4, 2.0 * 2 / 3 + 1.5),
        (0.5, 3.5),
        (7.0, 3.5),
    ],
)
def test_affinity_grows_with_the_utilization_of_the_fleet(
    utilization: float, affinity: float
) -> None:
    cost = Cost(affinity_percent=150, busy_affinity_percent=200)
    columns = LoadColumns([Load(utilization=utilization)])
    assert columns.affinity(1, cost) == pytest.approx(affinity)


@pytest.mark.parametrize(
    ("seconds", "affinity"), [(0.5, 4.5), (3.0, 9.5), (10.0, 23.5), (99, 23.5)]
)
def test_affinity_grows_where_every_worker_has_a_queue(seconds: float, affinity: float) -> None:
    cost = Cost(affinity_percent=150, busy_affinity_percent=200)
    queued = seconds * cost.prefill_tokens_per_second
    for utilization, less in ((0.9, 0.0), (0.0, 2.0)):
        loads = [Load(backlog_tokens=more, utilization=utilization) for more in (queued, 9e9)]
        assert LoadColumns(loads).affinity(2, cost) == pytest.approx(affinity - less)


@given(
    eligible=st.lists(st.integers(0, 300), min_size=1, unique=True),
    saved=st.lists(st.sampled_from([0.0, 16.0, 512.0])),
    count=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_sample_of_draws_eligible_workers_and_each_group_of_equal_holders(
    eligible: list[int], saved: list[float], count: int, seed: int
) -> None:
    holders = dict(zip(eligible, saved, strict=False))
    sample = sample_of(eligible, holders, count, Random(seed))
    assert len(sample) == len(set(sample))
    assert set(sample) <= set(eligible)
    assert len(sample) >= min(count, len(eligible))
    for one in set(holders.values()):
        equals = {place for place, tokens in holders.items() if tokens == one}
        assert len(equals & set(sample)) >= min(count, len(equals))
    assert len(sample) <= count * (1 + len(set(holders.values())))


def test_sample_size_shrinks_while_other_routers_are_known() -> None:
    loads = Loads({"w:1": EndpointLoad()})

    def size(**fields: Any) -> int:
        return sample_size(Policy(**fields), is_alone=not loads.routers)

    assert size() == SAMPLE_ALONE
    loads.record_report("other", "w:1", Gauges(1, 1, 1, 1, 1), 0.0, is_known=True)
    assert (size(), size(sample=0), size(sample=3)) == (SAMPLE_AMONG_ROUTERS, 0, 3)
    loads.forget("other", 0.0)
    assert size() == SAMPLE_ALONE


NAMES = st.lists(st.text("abcdef:.0123", min_size=1), min_size=1, max_size=12, unique=True)


def owner_of(session: str, names: Sequence[str]) -> str:
    return next(iter(session_credit(session, names, 0.0)))


@given(NAMES, st.text(max_size=20), st.randoms())
def test_session_credit_moves_a_session_only_with_its_own_worker(
    names: list[str], session: str, rng: Random
) -> None:
    owner, *second = session_credit(session, rng.sample(names, len(names)), 0.0)
    changed = rng.choice(names)
    left = [name for name in names if name != changed]
    if changed == owner:
        assert [*session_credit(session, left, 0.0)][:1] == second
    else:
        assert owner_of(session, left) == owner


def test_session_credit_spreads_sessions_and_moves_a_share_to_a_new_worker() -> None:
    names = [f"10.0.0.{number}:80" for number in range(8)]
    before = {name: owner_of(name, names) for name in map(str, range(2_000))}
    assert all(150 < count < 350 for count in Counter(before.values()).values())
    after = {name: owner_of(name, [*names, "new:80"]) for name in before}
    moved = {one for one in before if before[one] != after[one]}
    assert {after[one] for one in moved} == {"new:80"}
    assert 150 < len(moved) < 300


@pytest.mark.parametrize(("tokens", "credit"), [(0.0, 2_048.0), (9_000.0, 9_000.0)])
def test_session_credit_of_the_second_worker_is_half(tokens: float, credit: float) -> None:
    assert [*session_credit("s", ["a", "b", "c"], tokens).values()] == [credit, credit / 2]
    assert session_credit("\udcff", [], tokens) == {}


@given(st.lists(st.integers(0, 3), min_size=4, max_size=60), st.integers(1, 3), st.integers())
def test_sample_of_draws_few_of_many_equal_holders(saved: list[int], count: int, seed: int) -> None:
    holders = {place: float(tokens) for place, tokens in enumerate(saved) if tokens}
    chosen = sample_of(range(len(saved)), holders, count, Random(seed))
    assert len(set(chosen)) == len(chosen)
    later = Counter(holders[place] for place in chosen[count:])
    assert len(holders) <= count or all(number <= count for number in later.values())
    assert set(holders.values()) <= {holders.get(place) for place in chosen}
