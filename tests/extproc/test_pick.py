from collections.abc import Sequence
from random import Random

import pytest

from extproc.pick import POLICIES, RUNNING_REQUEST_TOKENS, Candidate, Scored, score
from kvstate.overlap import Overlap


def candidate(name: str = "a", **fields: object) -> Candidate:
    known: dict[str, object] = {"in_flight": 0, "backlog_tokens": 0.0} | fields
    return Candidate(endpoint=name, state="live", **known)  # type: ignore[arg-type]


def names(scored: Sequence[Scored]) -> list[str]:
    return [one.candidate.endpoint for one in scored]


def test_what_is_cached_on_the_device_costs_nothing() -> None:
    scored = score(candidate(overlaps=[Overlap(16, (4, 0, 0, 0))]), prompt_tokens=100)
    assert (scored.uncached_tokens, scored.cost, scored.certain_tokens) == (36, 36, 64)


def test_lower_tiers_are_worth_less_and_shown_apart() -> None:
    scored = score(candidate(overlaps=[Overlap(10, (1, 1, 1, 1))]), prompt_tokens=40)
    assert scored.uncached_tokens == pytest.approx(40 - 10 * (1 + 0.8 + 0.4 + 0.2))
    assert scored.blocks_by_tier == {"device": 1, "host": 1, "disk": 1, "remote": 1}


def test_uncertain_blocks_are_worth_half() -> None:
    scored = score(candidate(overlaps=[Overlap(10, uncertain=2)]), prompt_tokens=30)
    assert (scored.uncached_tokens, scored.certain_tokens, scored.uncertain_tokens) == (20, 0, 20)


def test_several_prompts_add_up() -> None:
    overlaps = [Overlap(10, (1, 0, 0, 0)), Overlap(10, (2, 0, 0, 0))]
    assert score(candidate(overlaps=overlaps), prompt_tokens=50).uncached_tokens == 20


def test_load_costs() -> None:
    scored = score(candidate(in_flight=2, backlog_tokens=30.0), prompt_tokens=5)
    assert scored.cost == 5 + 30 + 2 * RUNNING_REQUEST_TOKENS


def test_the_least_work_comes_first() -> None:
    scored = [
        score(candidate(name, backlog_tokens=load), 10) for name, load in (("a", 9), ("b", 1))
    ]
    assert names(POLICIES["cost"](scored, 0, Random(0))) == ["b", "a"]


def test_the_fewest_requests_come_first() -> None:
    scored = [score(candidate(name, in_flight=count), 10) for name, count in (("a", 2), ("b", 1))]
    assert names(POLICIES["least_request"](scored, 0, Random(0))) == ["b", "a"]


def test_turns_go_round() -> None:
    scored = [score(candidate(name), 10) for name in "abc"]
    orders = [names(POLICIES["round_robin"](scored, turn, Random(0))) for turn in range(4)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a"]
    assert orders[1] == ["b", "c", "a"]


@pytest.mark.parametrize("policy", ["cost", "least_request", "random"])
def test_ties_are_spread_by_chance(policy: str) -> None:
    scored = [score(candidate(name), 10) for name in "abc"]
    rng = Random(1)
    firsts = [names(POLICIES[policy](scored, 0, rng))[0] for _ in range(300)]
    assert all(firsts.count(name) > 60 for name in "abc")
