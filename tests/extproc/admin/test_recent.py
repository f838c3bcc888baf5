from extproc.admin.observed import Recent
from tests.extproc.admin.decisions import decided


def numbers(recent: Recent, since: int, limit: int = 100) -> list[int]:
    return [kept.number for kept in recent.since(since, limit)]


def test_who_answered_is_noted_as_long_as_the_decision_is_kept() -> None:
    recent, first, second = Recent(decisions=1), decided(), decided()
    recent.add(first, 0.0)
    recent.served(first, "b:1")
    found = recent.find(1)
    assert found is not None
    assert found.served == "b:1"
    recent.add(second, 1.0)
    recent.served(first, "c:1")
    assert [kept.served for kept in recent.since(0)] == [""]


def test_decisions_are_numbered_and_found() -> None:
    recent, decision = Recent(), decided()
    recent.add(decision, 7.0)
    found = recent.find(1)
    assert found is not None
    assert (found.number, found.at, found.decision) == (1, 7.0, decision)


def test_the_oldest_make_room() -> None:
    recent = Recent(decisions=2)
    for at in range(5):
        recent.add(decided(), at)
    assert (numbers(recent, 0), recent.find(3), recent.last) == ([4, 5], None, 5)


def test_many_candidates_count_as_many_decisions() -> None:
    recent = Recent(candidates=5)
    for at in range(5):
        recent.add(decided(), at)
    assert numbers(recent, 0) == [4, 5]


def test_the_newest_is_kept_however_large_it_is() -> None:
    recent = Recent(candidates=1)
    recent.add(decided(), 0.0)
    assert numbers(recent, 0) == [1]


def test_only_what_is_new_is_told_and_no_more_than_asked_for() -> None:
    recent = Recent()
    for at in range(5):
        recent.add(decided(), at)
    assert (numbers(recent, 3), numbers(recent, 5), numbers(recent, 0, 2)) == ([4, 5], [], [4, 5])


def test_a_number_of_an_earlier_router_begins_anew() -> None:
    recent = Recent()
    recent.add(decided(), 0.0)
    assert numbers(recent, 900) == [1]


def test_what_was_never_made_is_not_found() -> None:
    recent = Recent()
    assert recent.find(1) is None
    recent.add(decided(), 0.0)
    assert (recent.find(0), recent.find(2)) == (None, None)
