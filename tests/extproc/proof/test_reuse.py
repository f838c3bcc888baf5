import pytest

from extproc.proof.reuse import (
    DRAFT_DROP,
    GROUP_MISSING,
    LEAST_OUTCOMES,
    RECENT,
    ReuseFindings,
)

UNIT = 32


def noted(*errors: int, has_groups: bool = False) -> ReuseFindings:
    findings = ReuseFindings()
    for error in errors:
        findings.note(error, UNIT, has_groups=has_groups)
    return findings


def test_draft_is_learned_from_outcomes_that_are_lower_by_one_unit() -> None:
    findings = noted(*[UNIT] * (LEAST_OUTCOMES - 1))
    assert findings.as_json() == {"draft_drop": 0, "uncertain_because": DRAFT_DROP}
    findings.note(UNIT, UNIT, has_groups=False)
    assert findings.as_json() == {"draft_drop": 1, "uncertain_because": ""}


@pytest.mark.parametrize(("errors", "drop"), [([UNIT] * LEAST_OUTCOMES, 1), ([0] * RECENT, 0)])
def test_suspected_draft_is_in_doubt_until_outcomes_decide(errors: list[int], drop: int) -> None:
    findings = ReuseFindings()
    findings.suspect_draft()
    for error in errors:
        assert findings.doubt == DRAFT_DROP
        findings.note(error, UNIT, has_groups=False)
    assert findings.as_json() == {"draft_drop": drop, "uncertain_because": ""}


def test_draft_is_not_learned_from_some_lower_outcomes() -> None:
    assert noted(*[UNIT, UNIT, UNIT, 0] * 5).draft_drop == 0
    assert noted(*[2 * UNIT] * 20).draft_drop == 0


def test_draft_is_learned_in_spite_of_a_rare_exception() -> None:
    assert noted(*[UNIT] * 6, 0, *[UNIT] * 3).draft_drop == 1


def test_draft_is_forgotten_when_outcomes_are_higher_by_one_unit() -> None:
    findings = noted(*[UNIT] * LEAST_OUTCOMES, *[0] * RECENT)
    assert findings.draft_drop == 1
    for _ in range(LEAST_OUTCOMES):
        findings.note(-UNIT, UNIT, has_groups=False)
    assert findings.as_json() == {"draft_drop": 0, "uncertain_because": ""}


def test_higher_outcomes_change_nothing_without_a_draft() -> None:
    assert noted(*[-UNIT] * RECENT).as_json() == {"draft_drop": 0, "uncertain_because": ""}


@pytest.mark.parametrize(("has_groups", "doubt"), [(True, GROUP_MISSING), (False, "")])
def test_outcomes_that_are_lower_put_groups_in_doubt(doubt: str, *, has_groups: bool) -> None:
    assert noted(64, 0, 96, has_groups=has_groups).doubt == ""
    assert noted(64, 0, 96, 0, 640, has_groups=has_groups).doubt == doubt


def test_doubt_ends_when_outcomes_agree_again() -> None:
    findings = noted(64, 64, 64, *[0] * (RECENT - 1), has_groups=True)
    assert findings.doubt == GROUP_MISSING
    findings.note(-64, UNIT, has_groups=True)
    assert findings.doubt == ""


def test_rare_lower_outcomes_are_chance() -> None:
    assert noted(*[*[0] * 12, 64] * 8, has_groups=True).doubt == ""


@pytest.mark.parametrize(
    ("errors", "error", "has_groups", "are_known", "cause"),
    [
        ([UNIT, UNIT, 0], UNIT, True, True, DRAFT_DROP),
        ([UNIT, UNIT, 0], 2 * UNIT, True, True, ""),
        ([64, 96, 0, 64], UNIT, True, True, GROUP_MISSING),
        ([UNIT, 0, 0], UNIT, True, True, ""),
        ([UNIT, 0, 0], UNIT, True, False, GROUP_MISSING),
        ([UNIT, 0, 0], -UNIT, True, False, ""),
        ([64, 96, 0, 64], UNIT, False, True, ""),
    ],
)
def test_cause_of_an_outcome(
    errors: list[int], error: int, cause: str, *, has_groups: bool, are_known: bool
) -> None:
    findings = noted(*errors, has_groups=has_groups)
    found = findings.cause(error, UNIT, has_groups=has_groups, are_known=are_known)
    assert found == cause


def test_another_engine_is_learned_anew() -> None:
    findings = noted(*[UNIT] * LEAST_OUTCOMES, *[64] * 3, has_groups=True)
    assert (findings.draft_drop, findings.doubt) == (1, GROUP_MISSING)
    findings.forget()
    assert findings.as_json() == {"draft_drop": 0, "uncertain_because": ""}
