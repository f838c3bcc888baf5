from extproc.observing.elsewhere import (
    IS_DOWN,
    LEAST_ELSEWHERE,
    NOBODY_FOLLOWED,
    NOT_LISTED,
    RECENT,
    RETRIED,
    WARNING_SECONDS,
    Elsewhere,
)


def noted(**answers: str) -> Elsewhere:
    """By worker, its answers: e for one from elsewhere."""
    one = Elsewhere()
    for worker, each in answers.items():
        for answer in each:
            one.note(worker, is_elsewhere=answer == "e")
    return one


def test_answers_as_they_should_be_have_no_cause() -> None:
    one = noted(a="." * 9, b="ee......")
    assert [one.cause(name, is_down=False) for name in "abc"] == ["", "", ""]
    assert LEAST_ELSEWHERE > 2


def test_each_cause_is_told_from_the_others() -> None:
    assert noted(a="eee", b="....").cause("a", is_down=False) == NOT_LISTED
    assert noted(a="eee").cause("a", is_down=False) == NOT_LISTED
    assert noted(a="e.e..e..", b="....").cause("a", is_down=False) == RETRIED
    assert noted(a="eee", b="....").cause("a", is_down=True) == IS_DOWN
    assert noted(a="e.ee", b="ee.e", c="eee").cause("a", is_down=False) == NOBODY_FOLLOWED


def test_what_was_long_ago_is_forgotten() -> None:
    assert noted(a="eeeee" + RECENT * ".").cause("a", is_down=False) == ""


def test_all_are_counted_of_workers_that_are_there() -> None:
    one = noted(a="e.." + RECENT * ".", b="e")
    assert one.counts() == [("a", RECENT + 3, 1), ("b", 1, 1)]
    one.keep(["b"])
    assert one.counts() == [("b", 1, 1)]


def test_a_warning_is_due_now_and_then() -> None:
    one = Elsewhere()
    told = [one.may_warn(now) for now in (0.0, 1.0, WARNING_SECONDS, WARNING_SECONDS + 1.0)]
    assert told == [True, False, True, False]
