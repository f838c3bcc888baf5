"""Envoy's own policies, as they are played; tests/system/routing has a real Envoy beside them."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.whatif.engines import ModelledSpeed, Request
from kvtools.whatif.envoy_policies import (
    BY_SESSION,
    LEAST_REQUEST,
    MAGLEV,
    RING_HASH,
    RING_HASH_125,
    ROUND_ROBIN,
    WITHOUT_SESSIONS,
    BoundedLoads,
    MaglevTable,
    Ring,
    Table,
    balancer_of,
    hash_of,
)
from kvtools.whatif.routers import Arrivals, Contestant, Stage, proxy_of

ADDRESSES = [f"10.0.0.{host}:8000" for host in range(1, 9)]
SESSIONS = [f"session-{number}" for number in range(4_000)]
POLICIES = (*WITHOUT_SESSIONS, *BY_SESSION)

addresses_of_some = st.lists(st.ip_addresses(v=4).map(str), min_size=1, max_size=12, unique=True)


def counted(table: Table, sessions: list[str]) -> list[int]:
    found = Counter(table.endpoint(hash_of(one)) for one in sessions)
    return [found[number] for number in range(len(ADDRESSES))]


def test_table_spreads_sessions_evenly_and_a_ring_less_so() -> None:
    mean = len(SESSIONS) / len(ADDRESSES)
    assert all(0.8 * mean < one < 1.2 * mean for one in counted(MaglevTable(ADDRESSES), SESSIONS))
    assert all(0.5 * mean < one < 1.6 * mean for one in counted(Ring(ADDRESSES), SESSIONS))


@given(addresses_of_some, st.integers(0, (1 << 64) - 1))
def test_ring_moves_sessions_only_from_and_to_who_goes_and_comes(
    addresses: list[str], hashed: int
) -> None:
    # a number of endpoints by which the ring's entries can be divided, so that none has more
    few, many = addresses[: len(addresses) // 2] or addresses, addresses
    less, more = Ring(few, 1_024 * len(few)), Ring(many, 1_024 * len(many))
    now, then = many[more.endpoint(hashed)], few[less.endpoint(hashed)]
    assert now == then or now not in few


def test_most_sessions_keep_their_endpoint_in_a_table_without_one() -> None:
    all_of_them, rest = MaglevTable(ADDRESSES), MaglevTable(ADDRESSES[1:])
    hashes = [hash_of(one) for one in SESSIONS]
    stayed = [one for one in hashes if all_of_them.endpoint(one)]
    moved = sum(all_of_them.endpoint(one) - 1 != rest.endpoint(one) for one in stayed)
    assert moved < 0.1 * len(stayed)


@pytest.mark.parametrize("kind", [Ring, MaglevTable])
def test_later_attempts_reach_another_endpoint(kind: type[Ring] | type[MaglevTable]) -> None:
    table = kind(ADDRESSES)
    reached = {table.endpoint(hash_of("a"), attempt) for attempt in range(100)}
    assert reached == set(range(len(ADDRESSES)))


@given(st.lists(st.integers(0, 5), max_size=200), st.sampled_from([110, 125, 150]))
def test_bounded_loads_keep_their_bound(sessions: list[int], factor: int) -> None:
    bounded = BoundedLoads(Ring(ADDRESSES), len(ADDRESSES), factor)
    active = [0] * len(ADDRESSES)
    for one in sessions:
        slots = bounded.slots(active)
        number = bounded.endpoint(hash_of(f"session-{one}"), active)
        active[number] += 1
        assert active[number] <= slots + 1


def test_bounded_loads_take_the_least_overloaded_where_none_has_room() -> None:
    # some requests are with endpoints that have left, so the shares of the others are full
    bounded = BoundedLoads(Ring(ADDRESSES[:2]), 2, 10)
    assert bounded.slots([9, 8]) == 1
    assert {bounded.endpoint(hash_of(one), [9, 8]) for one in SESSIONS[:50]} == {1}


@pytest.mark.parametrize("policy", BY_SESSION)
def test_session_stays_and_a_request_without_one_goes_anywhere(policy: str) -> None:
    balancer, idle = balancer_of(policy, ADDRESSES, Random(1)), [0] * len(ADDRESSES)
    assert len({balancer.choose("a", idle) for _ in range(50)}) == 1
    assert len({balancer.choose("", idle) for _ in range(200)}) == len(ADDRESSES)


def test_least_request_takes_the_one_of_two_with_fewer_and_round_robin_all_in_turn() -> None:
    least = balancer_of(LEAST_REQUEST, ADDRESSES[:2], Random(1))
    assert Counter(least.choose("a", [1, 0]) for _ in range(200))[1] > 130
    robin = balancer_of(ROUND_ROBIN, ADDRESSES, Random(1))
    assert {robin.choose("a", []) for _ in ADDRESSES} == set(range(len(ADDRESSES)))


def picked(policy: str, stage: Stage, routers: int = 1) -> list[int]:
    requests = [
        Request(at / 10, range(at * 10, at * 10 + 10), 1_280, 10, (), session=f"{at % 20}")
        for at in range(200)
    ]
    contestant = Contestant(policy, policy, routers=routers)
    proxy = proxy_of(stage, contestant, Arrivals(requests), 3)
    proxy.fleet.run(proxy.requests, proxy.pick, proxy.over)
    return [one.worker for one in proxy.requests]


@pytest.mark.parametrize("policy", POLICIES)
def test_endpoint_that_refuses_gets_nothing_and_one_that_joins_gets_some(policy: str) -> None:
    stage = Stage([ModelledSpeed()] * 4, 1_000, lost_at=5.0, joins_at=15.0)
    workers = picked(policy, stage)
    assert [0 in workers[:50], 0 in workers[50:]] == [True, False]
    assert [3 in workers[:150], 3 in workers[150:]] == [False, True]


@pytest.mark.parametrize("policy", [RING_HASH, MAGLEV])
def test_several_envoys_send_a_session_to_the_same_endpoint(policy: str) -> None:
    stage = Stage([ModelledSpeed()] * 4, 1_000)
    assert picked(policy, stage) == picked(policy, stage, routers=4)


def test_several_envoys_count_only_their_own_requests() -> None:
    stage = Stage([ModelledSpeed().slower(50.0)] * 4, 1_000)
    assert picked(RING_HASH_125, stage) != picked(RING_HASH_125, stage, routers=4)


def test_only_endpoint_is_tried_although_it_refuses() -> None:
    assert set(picked(RING_HASH, Stage([ModelledSpeed()], 1_000, lost_at=19.0))) == {0}
