"""How verdicts are judged, by hand."""

from typing import Any

from tests.misses.judging import Score, adds_up, judged, table
from tests.misses.planting import Change
from tests.misses.truth import Truth

TOKENS = {"reused": 16, "changed": 84}
TRUTH = Truth(TOKENS, 20, "changed", True)
CHANGE = Change("tools", frozenset((2, 3)), frozenset(("moved",)))


def verdict(**others: Any) -> dict[str, Any]:
    change = {"at_token": 20, "part": "tools", "index": 3, "kind": "moved"}
    told = {"cause": "changed", "tokens": TOKENS, "prompt_tokens": 100, "change": change}
    return told | others


def test_verdict_that_says_the_truth_is_right() -> None:
    assert judged(verdict(), TRUTH, CHANGE) == (True, True, True, True, "")


def test_position_needs_the_token_the_part_and_the_number() -> None:
    told = verdict()["change"]
    for wrong in ({"at_token": 21}, {"part": "turn"}, {"index": 1}):
        one = judged(verdict(change=told | wrong), TRUTH, CHANGE)
        assert (one.position, one.kind, one.is_right) == (False, True, False)
    one = judged(verdict(change=None), TRUTH, CHANGE)
    assert (one.position, one.kind) == (False, False)
    assert one.says


def test_change_that_is_none_must_not_be_named() -> None:
    none = Truth(TOKENS, 100, "", False)
    one = judged(verdict(), none, None)
    assert (one.cause, one.position, one.kind) == (False, False, False)
    assert judged(verdict(cause="", change=None), none, None).is_right


def test_kind_must_be_one_that_the_change_may_be_called() -> None:
    told = verdict()["change"] | {"kind": "rewritten"}
    one = judged(verdict(change=told), TRUTH, CHANGE)
    assert (one.cause, one.position, one.kind, one.is_right) == (True, True, False, False)


def test_tokens_must_be_the_prompts() -> None:
    assert adds_up(verdict())
    assert not adds_up(verdict(prompt_tokens=99))
    assert not judged(verdict(tokens={"reused": 100}), TRUTH, CHANGE).tokens


def test_nineteen_of_twenty_are_enough() -> None:
    score = Score()
    for _ in range(19):
        score.add(judged(verdict(), TRUTH, CHANGE), "right")
    score.add(judged(verdict(cause="evicted"), TRUTH, CHANGE), "wrong")
    assert (score.turns, score.right, score.is_enough) == (20, 19, True)
    assert score.wrong == ["wrong: cause 'evicted', not 'changed'"]
    score.add(judged(verdict(cause="evicted"), TRUTH, CHANGE), "wrong")
    assert not score.is_enough


def test_table_has_a_line_for_each_cause() -> None:
    score = Score()
    score.add(judged(verdict(), TRUTH, CHANGE), "right")
    lines = table({"tools reordered": score}).splitlines()
    assert lines[1].split() == ["tools", "reordered", *["1"] * 6]
