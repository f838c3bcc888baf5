from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.observing.buckets import Seen
from extproc.observing.decisions import (
    BATCH,
    NO_TRACE,
    Course,
    DecisionCollector,
    DecisionCounts,
    Parent,
    parse,
)
from extproc.picking.decision import Candidate, Decision, Query, Snapshot, Split, decide
from extproc.picking.load import Load
from kvstate.overlap import Overlap, Prompt

SPLIT = "kvsteer_disaggregation"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def decision(held: int = 0, reason: str = "") -> Decision:
    """A decision on a prompt of 33 tokens, of which w holds `held`; with a reason, on none."""
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


def test_phases_follow_one_another() -> None:
    times = iter((1, 2, 4, 5, 8))
    noted = Course(lambda: next(times), "parent")
    noted.parsed()
    noted.tokenized()
    assert (noted.looked(), noted.picked()) == (5, 8)
    assert list(noted.phases()) == [
        ("parse", 1, 2),
        ("tokens", 2, 4),
        ("lookup", 4, 5),
        ("pick", 5, 8),
    ]
    assert (noted.traceparent, noted.trace) == ("parent", NO_TRACE)


def test_a_request_without_a_prompt_is_only_picked_for() -> None:
    noted = course(1, 2, 3)
    assert noted.now() == 2
    noted.picked()
    assert list(noted.phases()) == [("pick", 1, 3)]


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("ff", True)])
def test_a_header_names_a_span_and_whether_it_is_recorded(flags: str, is_sampled: bool) -> None:  # noqa: FBT001
    assert parse(f"00-{TRACE}-{SPAN}-{flags}") == Parent(int(TRACE, 16), int(SPAN, 16), is_sampled)


def test_a_later_version_may_go_on() -> None:
    assert parse(f"01-{TRACE}-{SPAN}-01-and-more") is not None
    assert parse(f"01-{TRACE}-{SPAN}-01.and-more") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_what_is_no_header_joins_no_trace(text: str) -> None:
    assert parse(text) is None


@given(st.text())
def test_any_text_is_a_parent_or_none(text: str) -> None:
    assert parse(text) is None
