"""Two fleets under a router that chooses, in the simulated time of the benchmark of probes."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from routing_closed_cells import agents
from routing_probe import CELLS, COST, table
from routing_probe_play import (
    LEAST_REQUEST,
    ONE,
    PROBE,
    RANDOM,
    SESSION,
    WEIGHTED_SESSION,
    Above,
    TwoFleets,
    play,
)

from kvtools.whatif.engines import Request

LOOP = agents(12, 200.0, 50.0)
SEED = 5


def request(at: float, session: str = "s") -> Request:
    return Request(at, list(range(40)), 40 * 128, 10, range(40, 41), session=session)


def fleets(choice: str, shares: tuple[float, float] = (0.5, 0.5)) -> TwoFleets:
    return TwoFleets(LOOP.stage, Above(choice, choice, COST, shares), SEED)


def served(one: TwoFleets, *requests: Request) -> list[int]:
    """The engines that got the requests, each sent once the one before has ended."""
    one.fleet.run(iter(requests), one.pick, one.over)
    return [each.worker for each in requests]


def test_probe_finds_the_fleet_that_holds_the_prompt() -> None:
    workers = served(fleets(PROBE), *[request(20.0 * number) for number in range(6)])
    assert len(set(workers)) == 1


def test_probe_promises_less_of_what_is_held_and_books_nothing() -> None:
    one = fleets(PROBE)
    (worker,) = served(one, request(0.0))
    asked = request(100.0)
    promised = [one.seconds(asked, 100.0) for _ in range(2)]
    holder = worker // 4
    assert promised[0] == promised[1]
    assert promised[0][holder] < 0.1 * promised[0][1 - holder]
    assert one.in_flight() == [0, 0]


def test_session_keeps_to_one_fleet_and_chance_does_not() -> None:
    by_session = served(fleets(SESSION), *[request(20.0 * number) for number in range(8)])
    by_chance = served(fleets(RANDOM), *[request(20.0 * number) for number in range(8)])
    assert len({worker // 4 for worker in by_session}) == 1
    assert len({worker // 4 for worker in by_chance}) == 2


def test_weighted_sessions_go_to_fleets_by_their_engines() -> None:
    requests = [request(20.0 * number, f"s{number}") for number in range(60)]
    workers = served(fleets(WEIGHTED_SESSION, (0.25, 0.75)), *requests)
    assert 5 <= sum(worker < 2 for worker in workers) <= 25


def test_uneven_fleets_have_engines_by_their_shares() -> None:
    small = fleets(LEAST_REQUEST, (0.25, 0.75))
    workers = served(small, *[request(0.001 * number, str(number)) for number in range(8)])
    assert sum(worker < 2 for worker in workers) == 4


@pytest.mark.parametrize("choice", [PROBE, RANDOM, ONE])
def test_agents_are_served_whoever_chooses(choice: str) -> None:
    found = play(LOOP, Above(choice, choice, COST), SEED)
    assert found.turns > 0
    assert 0 < found.hit_rate <= found.ideal_hit_rate


def test_asking_caches_more_than_chance() -> None:
    found = {each: [play(LOOP, Above(each, each, COST), SEED)] * 2 for each in (PROBE, RANDOM)}
    assert found[PROBE][0].hit_rate > found[RANDOM][0].hit_rate
    assert "| random |" in table(CELLS[0][0], found)
