from extproc.observing.elsewhere import (
    IS_DOWN,
    LEAST_ELSEWHERE,
    NOBODY_FOLLOWED,
    NOT_LISTED,
    RECENT,
    RETRIED,
    WARNING_SECONDS,
    Answers,
    Deliveries,
    WarningLimit,
)


def noted(**answers: str) -> dict[str, Answers]:
    """The answers by worker; an e is an answer from elsewhere."""
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


def told(deliveries: Deliveries, answers: str, at: float) -> None:
    """Looks at requests of model m, one per character; an e is answered elsewhere."""
    for answer in answers:
        deliveries.look("m")
        deliveries.note("m", at, is_elsewhere=answer == "e")


def test_every_steered_request_is_counted_once_by_what_became_of_it() -> None:
    deliveries = Deliveries()
    told(deliveries, "..e", 0.0)
    deliveries.look("m")  # still under way, so it does not count yet
    deliveries.look(None)
    deliveries.untold(None)
    steered = {"m": 10, None: 1}
    expected = {
        ("m", "delivered"): 2,
        ("m", "elsewhere"): 1,
        ("m", "unknown"): 6,
        ("", "delivered"): 0,
        ("", "elsewhere"): 0,
        ("", "unknown"): 1,
    }
    assert deliveries.counts(steered) == expected
    deliveries.note("m", 1.0, is_elsewhere=False)
    assert deliveries.counts(steered) == {**expected, ("m", "delivered"): 3}
    assert deliveries.totals(steered) == {"delivered": 3, "elsewhere": 1, "unknown": 7}


def test_the_share_is_of_the_last_minute_and_of_enough_answers() -> None:
    deliveries = Deliveries()
    told(deliveries, "e" * 19, 0.0)
    assert deliveries.share(0.0) is None
    told(deliveries, ".", 1.0)
    assert deliveries.share(1.0) == 0.05
    told(deliveries, "." * 20, 59.0)
    assert deliveries.share(59.0) == 21 / 40
    assert deliveries.share(61.0) == 1.0
    assert deliveries.share(200.0) is None


def test_too_few_deliveries_are_told_with_their_cause_until_enough_arrive() -> None:
    deliveries = Deliveries()
    told(deliveries, "." * 19 + "e", 0.0)
    assert deliveries.fault(0.0, lambda: "it is not there") == ""
    told(deliveries, "e", 0.0)
    words = deliveries.fault(0.0, lambda: "it is not there")
    assert (
        words == "only 90% of steered requests reached the worker picked for them: it is not there"
    )
    assert RETRIED in deliveries.fault(0.0, str)


def test_the_turn_to_too_few_and_back_is_told_once_each() -> None:
    deliveries = Deliveries()
    turns = []
    for second in range(200):
        told(deliveries, "e." if 20 <= second < 40 else "..", float(second))
        if deliveries.has_turned(float(second)):
            turns.append(second)
    low, well = turns
    assert 20 < low < 30
    assert 40 + 60 < well < 200
    assert not deliveries.has_turned(1000.0)
