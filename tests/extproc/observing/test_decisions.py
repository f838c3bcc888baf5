from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.observing.buckets import TracedValue
from extproc.observing.decisions import (
    BATCH,
    NO_TRACE,
    DecisionCollector,
    DecisionCounts,
    Timeline,
)
from extproc.observing.recent_counts import RECENT_MINUTES
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.claims.live_contexts import Context
from extproc.routing.decide import decide
from extproc.routing.decision import Decision, Split
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from extproc.routing.savings.belonging import Belonging
from kvstate.overlap import Overlap, Prompt

SPLIT = "kvsteer_disaggregation"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def decision(held: int = 0, reason: str = "") -> Decision:
    """A decision on a prompt of 33 tokens, of which w holds `held`; with a reason, on none."""
    overlaps = {"w": Overlap(16, (held // 16, 0, 0, 0))} if held else {}
    snapshot = Snapshot([Candidate("w", "w:1")], [overlaps], lambda *_: Load(), "cost", 0)
    prompts = [] if reason else [Prompt("m", array("I", range(33)))]
    return decide(PLAIN_REQUEST, Query("m", prompts, reason), snapshot, 0.0, Random(0))


def timeline(*times: float) -> Timeline:
    ticks = iter(times)
    return Timeline.begin(lambda: next(ticks))


def counted(*decisions: Decision) -> DecisionCounts:
    counts = DecisionCounts()
    for one in decisions:
        quick = timeline(0.0, 0.001)
        quick.picked_at = quick.clock()
        counts.note(one, quick)
    counts.settle()
    return counts


def phases(*courses: Timeline) -> DecisionCounts:
    counts = DecisionCounts()
    for one in courses:
        counts.note(decision(), one)
    counts.settle()
    return counts


def test_decision_counts_are_by_model_and_reason() -> None:
    counts = counted(decision(), decision(), decision(reason="no_body"))
    assert counts.by_reason == {("m", "nothing_cached"): 2, ("m", "no_body"): 1}
    assert sum(counts.seconds.counts) == 3


def test_split_counts_are_by_outcome_where_workers_have_roles() -> None:
    apart, here = (Split(None, "in words", outcome=outcome) for outcome in ("apart", "here"))
    split = [replace(decision(), split=one) for one in (apart, here, apart)]
    counts = counted(*split, decision())
    assert counts.by_split == {("m", "apart"): 2, ("m", "here"): 1}
    families = {one.name: one for one in DecisionCollector(counts).collect()}
    shown = [(one.labels["outcome"], one.value) for one in families[SPLIT].samples]
    assert shown == [("apart", 2), ("here", 1)]


@given(st.lists(st.floats(0, 300), min_size=1, max_size=20).map(sorted))
def test_each_decision_of_a_batch_counts_for_its_own_minute(picked: list[float]) -> None:
    counts, one = DecisionCounts(), decision()
    for at in picked:
        counts.note(one, Timeline(lambda: 0.0, 0.0, path="/v1/chat/completions", picked_at=at))
    counts.settle()
    for minute in range(6):
        shown = counts.keyed.recent(60.0 * (minute + RECENT_MINUTES))
        kept = sum(at // 60.0 > minute for at in picked)
        assert sum(each["requests"] for each in shown) == kept


def test_settle_counts_each_decision_once() -> None:
    counts = counted(decision())
    counts.settle()
    assert counts.by_reason == {("m", "nothing_cached"): 1}


def test_note_settles_a_full_batch() -> None:
    counts, one = DecisionCounts(), decision()
    for _ in range(BATCH + 1):
        counts.note(one, timeline(0.0))
    assert counts.by_reason == {("m", "nothing_cached"): BATCH}


def test_prompt_tokens_count_keyed_prompts_only() -> None:
    counts = counted(decision(reason="no_tokenizer"))
    assert (counts.prompt_tokens, counts.match_percent) == ({}, {})
    counts = counted(decision(), decision(), decision(reason="no_tokenizer"))
    assert counts.prompt_tokens == {"m": 66}
    assert counts.match_percent["m"].counts[0] == 2


def test_expect_begins_the_counts_of_a_model_at_zero() -> None:
    counts = DecisionCounts()
    counts.expect("m")
    assert (counts.prompt_tokens, counts.predicted_tokens) == ({"m": 0}, {"m": 0})
    assert counts.match_percent["m"].counts == [0] * 10


def test_match_percent_is_the_share_held() -> None:
    counts = counted(decision(held=32), decision(held=16))
    assert counts.predicted_tokens == {"m": 48}
    assert counts.match_percent["m"].total == pytest.approx(100 * 48 / 33)


def test_course_times_each_phase() -> None:
    one = timeline(1, 2, 4, 5, 8)
    one.parsed_at = one.clock()
    one.tokenized_at = one.clock()
    one.looked_at = one.clock()
    one.picked_at = one.clock()
    assert {phase: own.total for phase, own in phases(one).phases.items()} == {
        "parse": 1,
        "tokens": 2,
        "lookup": 1,
        "pick": 3,
    }


@pytest.mark.parametrize("reads_body", [False, True])
def test_course_omits_phases_that_did_not_happen(*, reads_body: bool) -> None:
    one = timeline(1, 2, 3)
    if reads_body:
        one.parsed_at = one.clock()
    one.picked_at = one.clock()
    found = phases(one)
    assert [sum(own.counts) for own in found.phases.values()] == [int(reads_body), 0, 0, 1]
    assert [own.total for own in found.phases.values()] == [float(reads_body), 0, 0, 1]


def test_phase_counts_cover_the_requests_that_had_the_phase() -> None:
    whole, short = timeline(1, 2, 4, 5, 8), timeline(10, 13)
    whole.parsed_at = whole.clock()
    whole.tokenized_at = whole.clock()
    whole.looked_at = whole.clock()
    for one in (whole, short):
        one.picked_at = one.clock()
    found = phases(whole, short)
    assert [sum(own.counts) for own in found.phases.values()] == [1, 1, 1, 2]
    assert [own.total for own in found.phases.values()] == [1, 2, 1, 3 + 3]


def test_phase_bucket_names_a_trace() -> None:
    counts, seen = counted(decision()), TracedValue("4bf9", 0.001, 12.0)
    counts.show(seen)
    assert [one for _, _, one in counts.seconds.cumulative() if one] == [seen]


def test_course_phases_follow_one_another() -> None:
    times = iter((1, 2, 4, 5, 8))
    noted = Timeline.begin(lambda: next(times), "parent")
    noted.parsed_at = noted.clock()
    noted.tokenized_at = noted.clock()
    noted.looked_at = noted.clock()
    noted.picked_at = noted.clock()
    assert list(noted.phases()) == [
        ("parse", 1, 2),
        ("tokens", 2, 4),
        ("lookup", 4, 5),
        ("pick", 5, 8),
    ]
    assert (noted.traceparent, noted.trace) == ("parent", NO_TRACE)


def test_course_of_a_request_without_a_prompt_has_a_pick_only() -> None:
    noted = timeline(1, 2, 3)
    assert noted.clock() == 2
    noted.picked_at = noted.clock()
    assert list(noted.phases()) == [("pick", 1, 3)]


def test_calls_are_all_but_those_of_no_model() -> None:
    counts = DecisionCounts()
    for reason in ("", "unknown_model", "unknown_model", "not_inference"):
        quick = timeline(0.0, 0.001)
        quick.picked_at = quick.clock()
        counts.note(decision(reason=reason), quick)
    assert (counts.calls(), counts.for_reason("unknown_model"), counts.total()) == (3, 2, 4)


@pytest.mark.parametrize(
    ("begins", "home", "steered", "expected"),
    [
        (True, "w", True, {"evicted": 68.0}),
        (True, "other", True, {"evicted": 68.0}),
        (False, "other", True, {"moved": 68.0}),
        (False, "w", True, {}),
        (True, "w", False, {}),
    ],
)
def test_recomputed_tokens_are_those_of_a_live_conversation_that_its_worker_lacks(
    begins: bool, home: str, steered: bool, expected: dict[str, float]
) -> None:
    made = decision(held=32)
    belonging = Belonging(home=home, counted=Context(80.0, 20.0, 1), begins=begins)
    made = replace(made, basis=replace(made.basis, belonging=belonging), is_steered=steered)
    found = counted(made, decision(held=32)).recomputed_tokens
    assert found == {("m", cause): tokens for cause, tokens in expected.items()}


def test_share_that_is_computed_again_is_that_of_the_last_minutes() -> None:
    belonging = Belonging(home="other", counted=Context(30.0, 12.0, 1))
    made = decision(held=32)
    counts = counted(replace(made, basis=replace(made.basis, belonging=belonging)))
    counts.settle()
    assert counts.recomputed_share("m", 1.0) == pytest.approx(10 / made.basis.prompt_tokens)
    assert counts.recomputed_share("other", 1.0) is None
    assert counts.recomputed_share("m", 3_600.0) is None


def test_recomputed_tokens_are_at_least_none() -> None:
    belonging = Belonging(home="other", counted=Context(10.0))
    made = decision(held=32)
    made = replace(made, basis=replace(made.basis, belonging=belonging))
    counts = counted(made)
    counts.expect("m")
    assert counts.recomputed_tokens == {("m", "moved"): 0.0, ("m", "evicted"): 0.0}
