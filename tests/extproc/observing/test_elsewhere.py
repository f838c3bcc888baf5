from extproc.observing.elsewhere import (
    IS_DOWN,
    LEAST_ELSEWHERE,
    NOBODY_FOLLOWED,
    NOT_LISTED,
    RECENT,
    RETRIED,
    WARNING_SECONDS,
    Answers,
    WarningLimit,
)


def noted(**answers: str) -> dict[str, Answers]:
    """By worker, its answers: e for one from elsewhere."""
    noted = {worker: Answers() for worker in answers}
    for worker, each in answers.items():
        for answer in each:
            noted[worker].note(is_elsewhere=answer == "e")
    return noted


def cause(fleet: dict[str, Answers], worker: str = "a", *, is_down: bool = False) -> str:
    return fleet[worker].cause(fleet.values, is_down=is_down)


def test_answers_as_they_should_be_have_no_cause() -> None:
    fleet = noted(a="." * 9, b="ee......", c="")
    assert [cause(fleet, name) for name in "abc"] == ["", "", ""]
    assert LEAST_ELSEWHERE > 2


def test_each_cause_is_told_from_the_others() -> None:
    assert cause(noted(a="eee", b="....")) == NOT_LISTED
    assert cause(noted(a="eee", b="")) == NOT_LISTED
    assert cause(noted(a="e.e..e..", b="....")) == RETRIED
    assert cause(noted(a="eee", b="...."), is_down=True) == IS_DOWN
    assert cause(noted(a="e.ee", b="ee.e", c="eee")) == NOBODY_FOLLOWED


def test_what_was_long_ago_is_forgotten() -> None:
    assert cause(noted(a="eeeee" + RECENT * ".")) == ""


def test_all_are_counted() -> None:
    answers = noted(a="e.." + RECENT * ".")["a"]
    assert (answers.looked_at, answers.elsewhere) == (RECENT + 3, 1)


def test_a_warning_is_due_now_and_then() -> None:
    one = WarningLimit()
    told = [one.may_warn(now) for now in (0.0, 1.0, WARNING_SECONDS, WARNING_SECONDS + 1.0)]
    assert told == [True, False, True, False]
