from array import array
from random import Random

from extproc.observing.buckets import Seen
from extproc.observing.course import Course
from extproc.observing.decision_counts import DecisionCounts
from extproc.picking.decision import Decision, Query, Snapshot, Worker, decide
from extproc.picking.load import Load
from kvstate.overlap import Overlap, Prompt


def decision(held: int = 0, reason: str = "") -> Decision:
    """One for a prompt of 33 tokens, of which a worker holds some; or for none, for a reason."""
    overlaps = {"w": Overlap(16, (held // 16, 0, 0, 0))} if held else {}
    snapshot = Snapshot([Worker("w", "w:1")], lambda _: overlaps, lambda *_: Load(), "cost", 0)
    prompts = [] if reason else [Prompt("m", array("I", range(33)))]
    return decide(Query("m", prompts, reason), snapshot, 0.0, Random(0))


def course(*times: float) -> Course:
    ticks = iter(times)
    return Course(lambda: next(ticks))


def test_decisions_are_counted_by_model_and_reason() -> None:
    counts = DecisionCounts()
    for one in (decision(), decision(), decision(reason="no_body")):
        counts.count(one, 0.001)
    assert counts.by_reason == {("m", "nothing_cached"): 2, ("m", "no_body"): 1}
    assert sum(counts.seconds.counts) == 3


def test_only_what_was_keyed_counts_as_prompt() -> None:
    counts = DecisionCounts()
    counts.count(decision(reason="no_tokenizer"), 0.001)
    assert (counts.prompt_tokens, counts.match_percent) == ({}, {})
    counts.count(decision(), 0.001)
    assert counts.prompt_tokens == {"m": 33}
    assert counts.match_percent["m"].counts[0] == 1


def test_what_is_expected_of_a_model_begins_at_nothing() -> None:
    counts = DecisionCounts()
    counts.expect("m")
    assert (counts.prompt_tokens, counts.predicted_tokens) == ({"m": 0}, {"m": 0})
    assert counts.match_percent["m"].counts == [0] * 10


def test_a_match_is_the_percent_that_is_held() -> None:
    counts = DecisionCounts()
    counts.count(decision(held=32), 0.001)
    assert counts.predicted_tokens == {"m": 32}
    assert counts.match_percent["m"].total == 100 * 32 / 33


def test_each_phase_has_its_time() -> None:
    counts, one = DecisionCounts(), course(1, 2, 4, 4, 5, 8)
    one.parsed()
    one.tokenized()
    one.timed(len)(())
    one.picked()
    counts.count_phases(one)
    assert {phase: own.total for phase, own in counts.phases.items()} == {
        "parse": 1,
        "tokens": 2,
        "lookup": 1,
        "pick": 3,
    }


def test_a_phase_that_did_not_come_to_pass_is_not_counted() -> None:
    counts, one = DecisionCounts(), course(1, 2)
    one.picked()
    counts.count_phases(one)
    assert [sum(own.counts) for own in counts.phases.values()] == [0, 0, 0, 1]


def test_a_bucket_points_at_a_trace() -> None:
    counts = DecisionCounts()
    seen = Seen("4bf9", 0.001, 12.0)
    counts.show(counts.count(decision(), 0.001), seen)
    assert [one for _, _, one in counts.seconds.cumulative() if one] == [seen]
