from array import array
from random import Random

import pytest
from msgspec.structs import replace

from extproc.observing.buckets import Seen
from extproc.observing.course import Course
from extproc.observing.decision_counts import BATCH, DecisionCollector, DecisionCounts
from extproc.picking.decision import Candidate, Decision, Query, Snapshot, Split, decide
from extproc.picking.load import Load
from kvstate.overlap import Overlap, Prompt

SPLIT = "kvsteer_disaggregation"


def decision(held: int = 0, reason: str = "") -> Decision:
    """One for a prompt of 33 tokens, of which a worker holds some; or for none, for a reason."""
    overlaps = {"w": Overlap(16, (held // 16, 0, 0, 0))} if held else {}
    snapshot = Snapshot([Candidate("w", "w:1")], [overlaps], lambda *_: Load(), "cost", 0)
    prompts = [] if reason else [Prompt("m", array("I", range(33)))]
    return decide(Query("m", prompts, reason), snapshot, 0.0, Random(0))


def course(*times: float) -> Course:
    ticks = iter(times)
    return Course(lambda: next(ticks))


def counted(*decisions: Decision) -> DecisionCounts:
    counts = DecisionCounts()
    for one in decisions:
        quick = course(0.0, 0.001)
        quick.picked()
        counts.note(one, quick)
    counts.settle()
    return counts


def phases(*courses: Course) -> DecisionCounts:
    counts = DecisionCounts()
    for one in courses:
        counts.note(decision(), one)
    counts.settle()
    return counts


def test_decisions_are_counted_by_model_and_reason() -> None:
    counts = counted(decision(), decision(), decision(reason="no_body"))
    assert counts.by_reason == {("m", "nothing_cached"): 2, ("m", "no_body"): 1}
    assert sum(counts.seconds.counts) == 3


def test_who_computes_a_prompt_is_counted_where_workers_take_parts_of_requests() -> None:
    apart, here = (Split(None, "in words", outcome=outcome) for outcome in ("apart", "here"))
    split = [replace(decision(), split=one) for one in (apart, here, apart)]
    counts = counted(*split, decision())
    assert counts.by_split == {("m", "apart"): 2, ("m", "here"): 1}
    families = {one.name: one for one in DecisionCollector(counts).collect()}
    shown = [(one.labels["outcome"], one.value) for one in families[SPLIT].samples]
    assert shown == [("apart", 2), ("here", 1)]


def test_what_is_settled_is_counted_once() -> None:
    counts = counted(decision())
    counts.settle()
    assert counts.by_reason == {("m", "nothing_cached"): 1}


def test_so_many_are_counted_without_being_looked_at() -> None:
    counts, one = DecisionCounts(), decision()
    for _ in range(BATCH + 1):
        counts.note(one, course(0.0))
    assert counts.by_reason == {("m", "nothing_cached"): BATCH}


def test_only_what_was_keyed_counts_as_prompt() -> None:
    counts = counted(decision(reason="no_tokenizer"))
    assert (counts.prompt_tokens, counts.match_percent) == ({}, {})
    counts = counted(decision(), decision(), decision(reason="no_tokenizer"))
    assert counts.prompt_tokens == {"m": 66}
    assert counts.match_percent["m"].counts[0] == 2


def test_what_is_expected_of_a_model_begins_at_nothing() -> None:
    counts = DecisionCounts()
    counts.expect("m")
    assert (counts.prompt_tokens, counts.predicted_tokens) == ({"m": 0}, {"m": 0})
    assert counts.match_percent["m"].counts == [0] * 10


def test_a_match_is_the_percent_that_is_held() -> None:
    counts = counted(decision(held=32), decision(held=16))
    assert counts.predicted_tokens == {"m": 48}
    assert counts.match_percent["m"].total == pytest.approx(100 * 48 / 33)


def test_each_phase_has_its_time() -> None:
    one = course(1, 2, 4, 5, 8)
    one.parsed()
    one.tokenized()
    one.looked()
    one.picked()
    assert {phase: own.total for phase, own in phases(one).phases.items()} == {
        "parse": 1,
        "tokens": 2,
        "lookup": 1,
        "pick": 3,
    }


@pytest.mark.parametrize("reads_body", [False, True])
def test_a_phase_that_did_not_come_to_pass_is_not_counted(*, reads_body: bool) -> None:
    one = course(1, 2, 3)
    if reads_body:
        one.parsed()
    one.picked()
    found = phases(one)
    assert [sum(own.counts) for own in found.phases.values()] == [int(reads_body), 0, 0, 1]
    assert [own.total for own in found.phases.values()] == [float(reads_body), 0, 0, 1]


def test_phases_that_only_some_had_are_counted_of_those() -> None:
    whole, short = course(1, 2, 4, 5, 8), course(10, 13)
    whole.parsed()
    whole.tokenized()
    whole.looked()
    for one in (whole, short):
        one.picked()
    found = phases(whole, short)
    assert [sum(own.counts) for own in found.phases.values()] == [1, 1, 1, 2]
    assert [own.total for own in found.phases.values()] == [1, 2, 1, 3 + 3]


def test_a_bucket_points_at_a_trace() -> None:
    counts, seen = counted(decision()), Seen("4bf9", 0.001, 12.0)
    counts.show(seen)
    assert [one for _, _, one in counts.seconds.cumulative() if one] == [seen]
