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


def test_cause_of_a_lower_outcome() -> None:
    drafting, plain = noted(UNIT, UNIT, 0), noted(UNIT, 0, 0)
    assert drafting.cause(UNIT, UNIT, has_groups=True) == DRAFT_DROP
    assert drafting.cause(2 * UNIT, UNIT, has_groups=True) == GROUP_MISSING
    assert plain.cause(UNIT, UNIT, has_groups=True) == GROUP_MISSING
    assert plain.cause(UNIT, UNIT, has_groups=False) == ""
    assert plain.cause(-UNIT, UNIT, has_groups=True) == ""


def test_another_engine_is_learned_anew() -> None:
    findings = noted(*[UNIT] * LEAST_OUTCOMES, *[64] * 3, has_groups=True)
    assert (findings.draft_drop, findings.doubt) == (1, GROUP_MISSING)
    findings.forget()
    assert findings.as_json() == {"draft_drop": 0, "uncertain_because": ""}
