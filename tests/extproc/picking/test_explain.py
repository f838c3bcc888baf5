from array import array
from random import Random
from typing import Any

import pytest
from msgspec import structs

from extproc.config.schema import Cost, Policy
from extproc.picking.decision import (
    CALLS_NO_MODEL,
    FINDS_MODEL,
    Decision,
    Query,
    Snapshot,
    Split,
    Verdict,
    decide,
)
from extproc.picking.eligibility import Candidate
from extproc.picking.explain import explanation, why
from extproc.picking.load import Load, Report
from extproc.picking.sent import Holdings, Sent
from kvstate.overlap import Overlap, Prompt

PROMPT = Prompt("m", array("I", range(100)))
QUERY = Query("m", [PROMPT])
HELD = {"a": Overlap(16, (2, 1, 0, 0), 1)}


def decision(query: Query = QUERY, **fields: Any) -> Decision:
    workers = fields.pop("workers", "ab")
    load = fields.pop("load", Load())
    held = fields.pop("held", HELD)
    defaults: dict[str, Any] = {
        "policy": "cost",
        "turn": 0,
        "rules": Policy(cost=Cost(150, 0, 64)),
    }
    snapshot = Snapshot(
        workers=[Candidate(name, f"{name}:1", "serves n" * (name == "x")) for name in workers],
        held=[held for _ in query.prompts],
        load=fields.pop("load_of", lambda *_: load),
        **(defaults | fields),
    )
    return decide(query, snapshot, 0.0, Random(0))


def test_an_explanation_has_every_term_of_every_cost() -> None:
    load = Load(1, 7.0, 2.0, 0.0, Report(2, 1, 0.0), 0.25)
    shown = explanation(decision(workers="a", load=load), lambda name: f"state of {name}")
    uncached = 100 - 32 - 0.8 * 16 - 8
    assert shown == {
        "model": "m",
        "prompt_tokens": 100,
        "policy": "cost",
        "steered": True,
        "session": None,
        "candidates": [
            {
                "endpoint": "a:1",
                "name": "a",
                "state": "state of a",
                "overlap_tokens": 48,
                "overlap_blocks": {"device": 2, "host": 1, "disk": 0, "remote": 0},
                "uncertain_tokens": 16,
                "speculative_tokens": 0,
                "approximate_tokens": 0,
                "in_flight": 1,
                "cost": pytest.approx(1.5 * uncached + 7 + 3 * 64),
                "cost_terms": {
                    "uncached_tokens": pytest.approx(uncached),
                    "slowness": 1.0,
                    "session": 0.0,
                    "uncached": pytest.approx(1.5 * uncached),
                    "queued": 7.0,
                    "running": 3 * 64.0,
                },
                "reported": {
                    "running": 2,
                    "waiting": 1,
                    "pending_tokens": None,
                    "cache_usage": None,
                    "of_others": 2.0,
                    "age_seconds": 0.25,
                },
                "excluded": None,
                "sampled": True,
            }
        ],
        "pick": ["a:1"],
        "rank": None,
        "verdict": "steer",
        "reason": "overlap",
        "why": "cost: a:1 is expected to hold 48 certain + 16 uncertain of 100 prompt tokens,"
        " cost 270",
        "prefill": None,
        "source": None,
    }


def test_who_computes_a_prompt_is_told_without_costs_that_were_not_compared() -> None:
    made = structs.replace(decision(), split=Split(None, "it is short"))
    assert why(made).endswith("; it computes the prompt: it is short")


def test_who_was_left_out_by_chance_is_named_and_has_no_cost_that_nobody_knows() -> None:
    made = decision(workers="abcdefghx", load=Load(1), sample=2)
    shown = explanation(made, lambda _: "live")["candidates"]
    chosen = {one["endpoint"] for one in shown if one["sampled"]}
    assert {*made.pick, "a:1", "x:1"} <= chosen
    assert len(chosen) <= 4
    for one in shown:
        assert (one["cost"] is None) is (one["endpoint"] not in chosen)
    assert why(made).endswith(f"; {len(chosen) - 1} of 9 workers were compared")


def test_an_explanation_asks_for_the_load_of_those_that_were_left_out() -> None:
    whole = decision(workers="abcdefgh", load=Load(1, 7.0))
    made = decision(workers="abcdefgh", load=Load(1, 7.0), sample=2)
    shown = explanation(made, lambda _: "live", lambda _: Load(1, 7.0))["candidates"]
    assert [one["cost"] for one in shown] == whole.costs


def test_what_excludes_a_candidate_is_named() -> None:
    shown = explanation(decision(workers="ax"), lambda _: "live")["candidates"]
    assert [one["excluded"] for one in shown] == [None, "serves n"]
    assert shown[1]["reported"] is None


def test_what_is_expected_is_shown_apart() -> None:
    sent = Sent(1)
    sent.record(Holdings("a"), sent.marks(PROMPT), 0.0)
    for state, field in (("live", "speculative"), ("stale", "approximate")):
        made = decision(held={}, sent=sent, state=lambda _, s=state: s)
        (shown,) = [
            one for one in explanation(made, lambda _: "")["candidates"] if one["cost"] < 150
        ]
        assert (shown["endpoint"], shown[f"{field}_tokens"]) == ("a:1", 64)
        assert why(made).startswith(f"cost: a:1 is expected to hold 64 {field} of 100")


def test_the_words_name_the_next_best() -> None:
    assert why(decision()).endswith("cost 71; next is b:1 with 150")
    alone = decision(rules=Policy(cost=Cost(150, 0, 64), endpoints=1))
    assert alone.pick == ("a:1",)
    assert why(alone).endswith("cost 71; next is b:1 with 150")


def test_other_policies_have_no_cost() -> None:
    assert why(decision(policy="round_robin", held={})) == (
        "round_robin: a:1 is expected to hold none of 100 prompt tokens"
    )


def test_the_words_say_that_the_proxy_chooses() -> None:
    query = Query(None, reason="body_too_large", left_to_proxy=FINDS_MODEL)
    words = "the model is not known here, so the proxy chooses: body_too_large"
    assert why(decision(query)) == words
    query = Query(None, reason="not_inference", left_to_proxy=CALLS_NO_MODEL)
    assert why(decision(query)) == "it calls no model, so the proxy chooses: not_inference"


def test_the_words_say_where_a_request_would_go_that_is_not_steered() -> None:
    left = structs.replace(decision(), is_steered=False)
    assert why(left) == f"not steered, so the proxy chooses; otherwise {why(decision())}"
    refused = decision(Query("m", left_to_proxy=CALLS_NO_MODEL, reason="not_inference"))
    assert why(structs.replace(refused, is_steered=False)) == why(refused)


def test_the_words_say_why_there_are_no_tokens() -> None:
    made = decision(Query("m", reason="no_body"), workers="a")
    assert why(made) == (
        "cost: a:1 is expected to hold none of 0 prompt tokens, cost 0; without tokens: no_body"
    )


def test_the_words_say_that_nobody_may_answer() -> None:
    made = decision(workers="x")
    assert (made.verdict, why(made)) == (
        Verdict.NO_OVERRIDE,
        "no worker may answer this request",
    )


def test_the_words_say_that_all_are_busy() -> None:
    made = decision(load=Load(9), rules=Policy(max_in_flight=9, shed=True))
    assert why(made) == "every worker that may answer is over its limit of requests"
    shown = explanation(made, lambda _: "live")
    assert (shown["verdict"], shown["candidates"][0]["excluded"]) == (
        "shed",
        "over its limit of requests",
    )


def test_the_worker_that_a_session_belongs_to_is_told_and_what_that_counts_for() -> None:
    query = Query("m", reason="body_too_large", unread_bytes=4_000, session="chat 7")
    made = decision(query, held={})
    shown = explanation(made, lambda _: "live")
    terms = {one["endpoint"]: one["cost_terms"]["session"] for one in shown["candidates"]}
    costs = {one["endpoint"]: one["cost"] for one in shown["candidates"]}
    assert shown["session"] == shown["pick"][0]
    assert sorted(terms.values()) == [1.5 * 512, 1.5 * 1024]
    assert costs == {name: pytest.approx(1.5 * 1_000 - term) for name, term in terms.items()}
    assert f"; its session belongs to {made.pick[0]};" in f"{why(made)};"


def test_a_session_whose_worker_has_too_much_to_do_is_told() -> None:
    query = Query("m", reason="no_body", session="chat 7")
    owner = decision(query, held={}).pick[0]
    busy = {owner: Load(0, 50_000.0)}
    made = decision(query, held={}, load_of=lambda endpoint, _: busy.get(endpoint, Load()))
    assert made.pick[0] != owner
    assert f"its session belongs to {owner}, which is too busy" in why(made)
