from array import array
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from extproc.decision import Decision, Query, Snapshot, Worker, decide, explanation
from extproc.pick import RUNNING_REQUEST_TOKENS, Load
from kvstate.overlap import Overlap, Prompt

PROMPT = Prompt("m", array("I", range(100)))


def decision(
    query: Query,
    held: Mapping[str, Overlap] | None = None,
    workers: str = "abcd",
    **fields: Any,
) -> Decision:
    loads = fields.get("loads", {})
    excluded = fields.get("excluded", {})
    snapshot = Snapshot(
        workers=[Worker(name, f"{name}:1", excluded.get(name, "")) for name in workers],
        overlaps=lambda _: held or {},
        load=lambda endpoint, _: loads.get(endpoint[0], Load()),
        policy=fields.get("policy", "cost"),
        turn=fields.get("turn", 0),
    )
    return decide(query, snapshot, now=0.0, rng=Random(0))


def test_the_worker_that_holds_the_prefix_is_picked_first_of_three() -> None:
    made = decision(Query("m", [PROMPT]), {"c": Overlap(16, (6, 0, 0, 0))})
    assert (made.pick[0], len(made.pick), made.reason) == ("c:1", 3, "overlap")
    assert (made.certain_tokens, made.uncached_tokens, made.prompt_tokens) == (96, 4, 100)


@pytest.mark.parametrize(
    ("held", "reason"),
    [({}, "nothing_cached"), ({"a": Overlap(16, uncertain=2)}, "uncertain_overlap")],
)
def test_the_reason_tells_what_the_pick_rests_on(held: Mapping[str, Overlap], reason: str) -> None:
    assert decision(Query("m", [PROMPT]), held).reason == reason


def test_load_outweighs_an_overlap_that_saves_less() -> None:
    held = {"a": Overlap(16, (2, 0, 0, 0))}
    assert decision(Query("m", [PROMPT]), held, "ab", loads={"a": Load(1)}).pick[0] == "b:1"
    assert decision(Query("m", [PROMPT]), held, "ab", loads={"b": Load(1)}).pick[0] == "a:1"


def test_several_prompts_add_up() -> None:
    made = decision(Query("m", [PROMPT, PROMPT]), {"a": Overlap(16, (2, 0, 0, 0))}, "a")
    assert (made.prompt_tokens, made.certain_tokens, made.uncached_tokens) == (200, 64, 136)


def test_a_query_without_prompts_is_placed_by_load_for_its_own_reason() -> None:
    made = decision(Query("m", reason="bad_json"))
    assert (len(made.pick), made.reason, made.prompt_tokens) == (3, "bad_json", 0)


def test_excluded_workers_have_no_turn() -> None:
    picks = [
        decision(Query("m"), policy="round_robin", turn=turn, excluded={"a": "x", "c": "x"}).pick[0]
        for turn in range(4)
    ]
    assert picks == ["b:1", "d:1", "b:1", "d:1"]


def test_turns_go_round() -> None:
    picks = [
        decision(Query("m", [PROMPT]), policy="round_robin", turn=turn).pick for turn in range(5)
    ]
    assert [pick[0] for pick in picks] == ["a:1", "b:1", "c:1", "d:1", "a:1"]
    assert picks[3] == ("d:1", "a:1", "b:1")
    assert decision(Query("m"), policy="round_robin").reason == "policy_round_robin"


def test_excluded_workers_are_shown_but_not_picked() -> None:
    made = decision(Query("m", [PROMPT]), workers="ab", excluded={"a": "serves n"})
    assert made.pick == ("b:1",)
    shown = explanation(made, lambda _: "live")["candidates"]
    assert [one["excluded"] for one in shown] == ["serves n", None]


def test_with_no_worker_there_is_nothing_to_say() -> None:
    made = decision(Query("m", [PROMPT]), workers="")
    assert (made.pick, made.reason) == ((), "no_worker")


def test_the_explanation_has_every_field_of_the_contract() -> None:
    held = {"a": Overlap(16, (2, 1, 0, 0), 1)}
    made = decision(Query("m", [PROMPT]), held, "a", loads={"a": Load(1, 7.0)})
    assert explanation(made, lambda name: f"state of {name}") == {
        "model": "m",
        "prompt_tokens": 100,
        "candidates": [
            {
                "endpoint": "a:1",
                "state": "state of a",
                "overlap_tokens": 48,
                "overlap_blocks": {"device": 2, "host": 1, "disk": 0, "remote": 0},
                "uncertain_tokens": 16,
                "speculative_tokens": 0,
                "in_flight": 1,
                "cost": pytest.approx(100 - 32 - 0.8 * 16 - 8 + 7 + RUNNING_REQUEST_TOKENS),
                "excluded": None,
            }
        ],
        "pick": ["a:1"],
        "reason": "overlap",
    }
