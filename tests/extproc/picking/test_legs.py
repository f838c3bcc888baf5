from array import array
from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
import pytest

from extproc.config.schema import Policy
from extproc.config.sections import Disaggregation
from extproc.picking.decision import Decision, Query, Snapshot, Verdict, decide
from extproc.picking.eligibility import Candidate, Demand
from extproc.picking.explain import explanation, why
from extproc.picking.legs import COMPUTES_FOR_OTHERS, WORDS, decide_legs, with_source
from extproc.picking.load import Load
from kvstate.overlap import Overlap, Prompt

ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode", "b": "both"}
QUERY = Query("m", [Prompt("m", array("I", range(4000)))])
POLICY = Policy()
BUSY = Load(in_flight=8)
HEADER = Disaggregation("header", "offloading")
SGLANG = Disaggregation("mirror", "sglang")


def decided(
    workers: str = "pqd",
    loads: Mapping[str, Load] | None = None,
    held: Mapping[str, int] | None = None,
    query: Query = QUERY,
    rules: Disaggregation = HEADER,
    policy_rules: Policy = POLICY,
    **more: Any,
) -> Decision:
    """Decides; held: blocks of 16 tokens, by worker."""
    known = loads or {}
    overlaps = {name: Overlap(16, (blocks, 0, 0, 0)) for name, blocks in (held or {}).items()}
    snapshot = Snapshot(
        workers=[Candidate(name, f"{name}:1", role=ROLES[name]) for name in workers],
        held=[overlaps for _ in query.prompts],
        load=lambda endpoint, _: known.get(endpoint[0], Load()),
        policy="cost",
        turn=0,
        rules=policy_rules,
        **more,
    )
    return decide_legs(query, snapshot, rules, 0.0, Random(0))


def legs(made: Decision) -> tuple[str, str]:
    """Returns who answers and who computes for it, "" for nobody."""
    prefill = made.prefill
    return made.worker, "" if prefill is None else prefill.worker


def outcome_of(made: Decision) -> str:
    assert made.split is not None
    return made.split.outcome


def test_a_decode_worker_that_answers_others_leaves_a_long_prompt_to_a_prefill_worker() -> None:
    made = decided(loads={"d": BUSY})
    assert legs(made) in {("d", "p"), ("d", "q")}
    assert made.pick == ("d:1",)


def test_an_idle_decode_worker_computes_the_prompt_itself() -> None:
    assert legs(decided()) == ("d", "")


def test_a_queue_on_the_prefill_workers_keeps_the_prompt_where_it_is_answered() -> None:
    queued = Load(1, 100_000.0)
    assert legs(decided(loads={"d": BUSY, "p": queued, "q": queued})) == ("d", "")
    assert legs(decided(loads={"d": BUSY, "p": queued})) == ("d", "q")


def test_a_prefill_worker_is_picked_by_what_it_holds() -> None:
    for name in "pq":
        assert legs(decided(loads={"d": BUSY}, held={name: 200})) == ("d", name)


def test_what_the_decode_worker_holds_need_not_be_computed_elsewhere() -> None:
    made = decided(loads={"d": BUSY}, held={"d": 243})
    assert legs(made) == ("d", "")
    assert made.split is not None
    assert "fewer than 128" in made.split.why


def test_a_slow_transfer_is_not_worth_it() -> None:
    rules = Disaggregation("header", transfer_tokens_per_second=1_000)
    assert legs(decided(loads={"d": Load(4)}, rules=rules)) == ("d", "")
    assert legs(decided(loads={"d": Load(4)}))[1] != ""


def test_a_fleet_that_is_slower_than_configured_splits_as_one_that_is_not() -> None:
    for slowness in (0.5, 1.0, 3.0):
        loads = {name: Load(4 * (name == "d"), slowness=slowness) for name in "dpq"}
        assert legs(decided(loads=loads))[1] != ""
        made = decided(loads=loads | {"d": Load(0, slowness=slowness)})
        assert legs(made) == ("d", "")
    slow = {"d": Load(1, slowness=4.0)}
    assert outcome_of(decided(loads=slow)) == "apart"


def test_a_prompt_on_a_slow_decode_worker_costs_as_much_as_it_takes_there() -> None:
    made = decided(loads={"d": Load(1, slowness=4.0)})
    assert made.split is not None
    assert made.split.here == pytest.approx(4.0 * 4000 * 1.5)


def test_each_outcome_is_told_by_what_led_to_it() -> None:
    busy, whole = {"d": BUSY}, {"b": Load()} | {"d": BUSY}
    assert outcome_of(decided(loads=busy)) == "apart"
    assert outcome_of(decided("pd", rules=SGLANG)) == "needed"
    assert outcome_of(decided()) == "here"
    assert outcome_of(decided(loads=busy, held={"d": 243})) == "few_tokens"
    assert outcome_of(decided("pdb", loads=whole)) == "whole"
    assert outcome_of(decided("d")) == "no_prefill_worker"
    assert outcome_of(decided(rules=Disaggregation())) == "not_set"


def test_a_worker_of_both_roles_takes_whole_requests_only() -> None:
    made = decided("pqb", loads={"b": BUSY})
    assert legs(made) == ("b", "")
    assert legs(decided("pqdb", loads={"d": BUSY})) == ("b", "")


def test_prefill_workers_answer_nothing() -> None:
    made = decided("pq")
    assert (made.pick, made.verdict) == ((), Verdict.NO_OVERRIDE)
    assert set(made.excluded) == {COMPUTES_FOR_OTHERS}


@pytest.mark.parametrize(
    ("query", "outcome"),
    [
        (msgspec.structs.replace(QUERY, may_split=False), "body"),
        (msgspec.structs.replace(QUERY, answers=2), "several_answers"),
        (msgspec.structs.replace(QUERY, prompts=list(QUERY.prompts) * 2), "several_prompts"),
        (Query("m"), "no_prompt"),
    ],
)
def test_some_requests_have_one_leg(query: Query, outcome: str) -> None:
    made = decided(loads={"d": BUSY}, query=query)
    assert legs(made) == ("d", "")
    assert made.split is not None
    assert (made.split.outcome, made.split.why) == (outcome, WORDS[outcome])


def test_without_a_mode_nothing_is_split() -> None:
    assert legs(decided(loads={"d": BUSY}, rules=Disaggregation())) == ("d", "")


def test_prefill_workers_that_cannot_take_it_are_left_out() -> None:
    busy = {"d": BUSY}
    assert legs(decided(loads=busy, ejected={"p:1": "dead"})) == ("d", "q")
    assert legs(decided(loads=busy, unfit={"q:1": "draining"})) == ("d", "p")
    assert legs(decided(loads=busy, unfit={"q:1": "draining"}, ejected={"p:1": "x"})) == ("d", "")
    subset = msgspec.structs.replace(QUERY, demand=Demand(subset=frozenset({"d:1", "q:1"})))
    assert legs(decided(loads=busy, query=subset)) == ("d", "q")


def test_a_prefill_worker_in_doubt_is_used_only_where_all_are() -> None:
    busy = {"d": BUSY}
    assert legs(decided(loads=busy, held={"p": 200}, doubted=["p:1"])) == ("d", "q")
    assert legs(decided(loads=busy, held={"p": 200}, doubted=["p:1", "q:1"])) == ("d", "p")
    assert legs(decided("pd", loads=busy, doubted=["p:1", "d:1"])) == ("d", "p")


def test_a_retry_of_two_legs_finds_decode_workers_only() -> None:
    made = decided("pdeb", loads={"d": BUSY, "e": BUSY, "b": Load(9, 50_000.0)})
    assert legs(made)[1] == "p"
    assert set(made.pick) == {"d:1", "e:1"}


def test_sglang_never_computes_on_a_decode_worker() -> None:
    assert legs(decided("pd", rules=SGLANG)) == ("d", "p")
    assert legs(decided("pd", rules=SGLANG, held={"d": 249})) == ("d", "p")
    made = decided("pdb", rules=SGLANG, ejected={"p:1": "dead"})
    assert (legs(made), made.pick) == (("b", ""), ("b:1",))
    assert "cannot compute" in made.excluded[1]


def test_sglang_retries_a_whole_request_on_workers_of_both_roles_only() -> None:
    made = decided("pdb", rules=SGLANG, loads={"d": BUSY})
    assert (legs(made), made.pick) == (("b", ""), ("b:1",))


def test_sglang_takes_a_batch_of_prompts_and_what_has_no_prompt() -> None:
    batch = msgspec.structs.replace(QUERY, prompts=list(QUERY.prompts) * 2)
    assert legs(decided("pd", rules=SGLANG, query=batch)) == ("d", "p")
    assert legs(decided("pd", rules=SGLANG, query=Query("m"))) == ("d", "")


def test_sglang_without_a_prefill_worker_is_left_to_the_proxy() -> None:
    made = decided("d", rules=SGLANG)
    assert (made.pick, made.verdict) == ((), Verdict.NO_OVERRIDE)


def test_every_prefill_worker_over_its_limit_is_used_all_the_same() -> None:
    full = {"p": Load(9), "q": Load(9), "d": Load(1)}
    policy = Policy(max_in_flight=4, shed=True)
    assert legs(decided(loads=full, rules=SGLANG, policy_rules=policy))[1] in {"p", "q"}


def test_an_explanation_shows_both_legs_and_why() -> None:
    made = decided(loads={"d": BUSY})
    shown = explanation(made, lambda _: "live")["prefill"]
    assert shown["pick"] in {"p:1", "q:1"}
    assert shown["cost"]["here"] > shown["cost"]["apart"] > 0
    assert [one["endpoint"] for one in shown["candidates"]] == ["p:1", "q:1"]
    assert "computes the prompt: computing the prompt elsewhere costs less" in why(made)
    whole = explanation(decided(), lambda _: "live")["prefill"]
    assert (whole["pick"], "candidates" in whole) == (None, False)
    assert "it computes the prompt" in why(decided())


def pulling(
    held: Mapping[str, int], query: Query = QUERY, ejected: tuple[str, ...] = (), ports: str = "abc"
) -> Decision:
    """Decides among plain workers by turn, so the first one is picked; held: blocks of 16 tokens.

    ports: the workers that hand over.
    """
    overlaps = {name: Overlap(16, (blocks, 0, 0, 0)) for name, blocks in held.items()}
    workers = [
        Candidate(name, f"{name}:1", transfer_port=5710 if name in ports else None)
        for name in "abc"
    ]
    snapshot = Snapshot(workers, [overlaps for _ in query.prompts], idle, "round_robin", 0)
    made = decide(query, snapshot, 0.0, Random(0))
    return with_source(query, made, 512, ejected)


def idle(*_: object) -> Load:
    return Load()


def test_who_holds_enough_more_than_the_pick_is_named_to_pull_from() -> None:
    made = pulling({"a": 10, "b": 100, "c": 200})
    assert made.source == ("c:1", 5710, 190 * 16)
    assert made.pick == ("a:1", "b:1")
    assert made.uncached_tokens == 4000 - 200 * 16
    assert explanation(made, lambda _: "live")["source"]["endpoint"] == "c:1"
    assert "it pulls 3040 tokens from c:1" in why(made)


def test_nothing_is_pulled_where_it_is_not_worth_it_or_cannot_be() -> None:
    assert pulling({"a": 10, "b": 41}).source is None
    assert pulling({"a": 200, "b": 10}).source is None
    assert pulling({}).source is None
    assert pulling({"b": 100}, ports="ac").source is None
    assert pulling({"b": 100}, ports="bc").source is None
    assert pulling({"b": 100, "c": 90}, ejected=("b:1",)).source == ("c:1", 5710, 90 * 16)
    for query in (
        msgspec.structs.replace(QUERY, may_split=False),
        msgspec.structs.replace(QUERY, answers=2),
        msgspec.structs.replace(QUERY, reads_cache=False),
        Query("m"),
    ):
        assert pulling({"b": 100}, query).source is None


def test_a_request_of_two_legs_pulls_nothing_besides() -> None:
    made = decided(loads={"d": BUSY}, held={"p": 200})
    assert with_source(QUERY, made, 1, ()) is made
    nobody = decided("p")
    assert with_source(QUERY, nobody, 1, ()) is nobody
