from msgspec.structs import replace

from extproc.admin.recent import RecentDecision, RecentDecisions, summary, with_ids
from extproc.requests.request import Head
from extproc.routing.decision import Split
from kvstate.overlap import Overlap
from tests.extproc.admin.decisions import decided

OVERLAP = Overlap(16, (1, 0, 0, 0), 0)


def numbers(recent: RecentDecisions, since: int, limit: int = 100) -> list[int]:
    return [kept.number for kept in recent.newest_after(since, limit)]


def test_served_is_noted_while_the_decision_is_kept() -> None:
    recent, first, second = RecentDecisions(decisions=1), decided(), decided()
    recent.add(first, 0.0)
    recent.note_server(first, "b:1")
    found = recent.find(1)
    assert found is not None
    assert found.served == "b:1"
    recent.add(second, 1.0)
    recent.note_server(first, "c:1")
    assert [kept.served for kept in recent.newest_after(0)] == [""]


def test_recent_numbers_and_finds_decisions() -> None:
    recent, decision = RecentDecisions(), decided()
    recent.add(decision, 7.0)
    found = recent.find(1)
    assert found is not None
    assert (found.number, found.at, found.decision) == (1, 7.0, decision)


def test_recent_evicts_the_oldest() -> None:
    recent = RecentDecisions(decisions=2)
    for at in range(5):
        recent.add(decided(), at)
    assert (numbers(recent, 0), recent.find(3), recent.last) == ([4, 5], None, 5)


def test_recent_counts_candidates_against_its_bound() -> None:
    recent = RecentDecisions(candidates=5)
    for at in range(5):
        recent.add(decided(), at)
    assert numbers(recent, 0) == [4, 5]


def test_recent_keeps_the_newest_whatever_its_size() -> None:
    recent = RecentDecisions(candidates=1)
    recent.add(decided(), 0.0)
    assert numbers(recent, 0) == [1]


def test_newest_after_returns_newer_decisions_up_to_the_limit() -> None:
    recent = RecentDecisions()
    for at in range(5):
        recent.add(decided(), at)
    assert (numbers(recent, 3), numbers(recent, 5), numbers(recent, 0, 2)) == ([4, 5], [], [4, 5])


def test_newest_after_begins_anew_for_a_number_of_an_earlier_router() -> None:
    recent = RecentDecisions()
    recent.add(decided(), 0.0)
    assert numbers(recent, 900) == [1]


def test_find_is_none_for_an_unknown_number() -> None:
    recent = RecentDecisions()
    assert recent.find(1) is None
    recent.add(decided(), 0.0)
    assert (recent.find(0), recent.find(2)) == (None, None)


def test_summary_names_worker_and_reason_and_no_token() -> None:
    shown = summary(RecentDecision(3, 1.23456, decided({"b:1": OVERLAP})))
    assert (shown["id"], shown["at"], shown["worker"], shown["reason"]) == (
        3,
        1.235,
        "b:1",
        "overlap",
    )
    assert (shown["predicted_tokens"], shown["prompt_tokens"], shown["candidates"]) == (16, 32, 2)
    assert shown["pick"] == ["b:1", "a:1"]


def test_summary_names_the_prefill_worker() -> None:
    prefill = decided(names=("p:1",))
    made = replace(decided(), split=Split(prefill, "it costs less"))
    assert [summary(RecentDecision(1, 0.0, one))["prefill"] for one in (made, decided())] == [
        "p:1",
        None,
    ]


def test_summary_covers_a_decision_without_a_pick() -> None:
    shown = summary(RecentDecision(1, 0.0, decided(names=())))
    assert (shown["pick"], shown["worker"], shown["verdict"]) == ([], "", "no_override")


def test_decisions_are_found_by_the_ids_of_request_and_trace() -> None:
    trace = "ab" * 16
    parent = f"00-{trace}-{'cd' * 8}-00"
    heads = [Head("", "", None, request_id=f"r-{number}") for number in (1, 2)]
    heads.append(Head("", "", None, request_id="r-2", traceparent=parent))
    kept = [RecentDecision(at, 0.0, decided(), head=head) for at, head in enumerate(heads)]
    assert with_ids(kept, "r-2") == kept[1:]
    assert with_ids(kept, "", trace) == kept[2:]
    assert with_ids(kept) == kept
    assert summary(kept[2])["trace_id"] == trace
    assert summary(kept[1])["trace_id"] == ""
