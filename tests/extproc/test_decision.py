from array import array
from collections.abc import Mapping
from random import Random

import pytest

from extproc.decision import Decision, Query, Snapshot, Worker, decide
from kvstate.overlap import Overlap, Prompt

PROMPT = Prompt("m", array("I", range(100)))


def decision(
    query: Query,
    held: Mapping[str, Overlap] | None = None,
    excluded: Mapping[str, str] | None = None,
    policy: str = "cost",
    workers: str = "abcd",
) -> Decision:
    snapshot = Snapshot(
        workers=[
            Worker(name, f"{name}:1", "live", (excluded or {}).get(name, "")) for name in workers
        ],
        overlaps=lambda _: held or {},
        in_flight=lambda _: 0,
        backlog_tokens=lambda *_: 0.0,
        policy=policy,
        turn=0,
    )
    return decide(query, snapshot, now=0.0, rng=Random(0))


def test_the_worker_that_holds_the_prefix_is_picked_first_of_three() -> None:
    made = decision(Query("m", [PROMPT]), {"c": Overlap(16, (6, 0, 0, 0))})
    assert (made.pick[0], len(made.pick), made.reason) == ("c:1", 3, "overlap")
    assert made.best is not None
    assert (made.best.certain_tokens, made.prompt_tokens) == (96, 100)


@pytest.mark.parametrize(
    ("held", "reason"),
    [({}, "nothing_cached"), ({"a": Overlap(16, uncertain=2)}, "uncertain_overlap")],
)
def test_the_reason_tells_what_the_pick_rests_on(held: Mapping[str, Overlap], reason: str) -> None:
    assert decision(Query("m", [PROMPT]), held).reason == reason


def test_a_query_without_prompts_is_placed_by_load_for_its_own_reason() -> None:
    made = decision(Query("m", reason="bad_json"))
    assert (len(made.pick), made.reason, made.prompt_tokens) == (3, "bad_json", 0)


def test_other_policies_say_so() -> None:
    assert decision(Query("m", [PROMPT]), policy="round_robin").reason == "policy_round_robin"


def test_excluded_workers_are_shown_but_not_picked() -> None:
    made = decision(Query("m", [PROMPT]), excluded={"a": "serves n"}, workers="ab")
    assert made.pick == ("b:1",)
    assert made.as_json()["candidates"][0]["excluded"] == "serves n"


def test_with_no_worker_there_is_nothing_to_say() -> None:
    made = decision(Query("m", [PROMPT]), workers="")
    assert (made.pick, made.reason, made.best) == ((), "no_worker", None)


def test_the_explanation_has_every_field_of_the_contract() -> None:
    made = decision(Query("m", [PROMPT]), {"a": Overlap(16, (2, 1, 0, 0), 1)}, workers="a")
    assert made.as_json() == {
        "model": "m",
        "prompt_tokens": 100,
        "candidates": [
            {
                "endpoint": "a:1",
                "state": "live",
                "overlap_tokens": 48,
                "overlap_blocks": {"device": 2, "host": 1, "disk": 0, "remote": 0},
                "uncertain_tokens": 16,
                "speculative_tokens": 0,
                "in_flight": 0,
                "cost": pytest.approx(100 - 32 - 0.8 * 16 - 8),
                "excluded": None,
            }
        ],
        "pick": ["a:1"],
        "reason": "overlap",
    }
