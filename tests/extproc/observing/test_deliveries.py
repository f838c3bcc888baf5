from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.deliveries import (
    IS_DOWN,
    LEAST_ELSEWHERE,
    NOBODY_FOLLOWED,
    NOT_LISTED,
    RECENT,
    RETRIED,
    WARNING_SECONDS,
    Answers,
    DeliveryCounts,
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


def test_cause_is_empty_for_followed_picks() -> None:
    fleet = noted(a="." * 9, b="ee......", c="")
    assert [cause(fleet, name) for name in "abc"] == ["", "", ""]
    assert LEAST_ELSEWHERE > 2


def test_cause_distinguishes_unlisted_retried_and_down_workers() -> None:
    assert cause(noted(a="eee", b="....")) == NOT_LISTED
    assert cause(noted(a="eee", b="")) == NOT_LISTED
    assert cause(noted(a="e.e..e..", b="....")) == RETRIED
    assert cause(noted(a="eee", b="...."), is_down=True) == IS_DOWN
    assert cause(noted(a="e.ee", b="ee.e", c="eee")) == NOBODY_FOLLOWED


def test_cause_forgets_old_answers() -> None:
    assert cause(noted(a="eeeee" + RECENT * ".")) == ""


def test_answers_count_all_and_those_from_elsewhere() -> None:
    answers = noted(a="e.." + RECENT * ".")["a"]
    assert (answers.looked_at, answers.elsewhere) == (RECENT + 3, 1)


def test_may_warn_is_true_at_intervals() -> None:
    one = WarningLimit()
    told = [one.may_warn(now) for now in (0.0, 1.0, WARNING_SECONDS, WARNING_SECONDS + 1.0)]
    assert told == [True, False, True, False]


def told(deliveries: DeliveryCounts, answers: str, at: float) -> None:
    """Looks at requests of model m, one per character; an e is answered elsewhere."""
    for answer in answers:
        deliveries.look("m")
        deliveries.note("m", at, is_elsewhere=answer == "e")


def test_deliveries_count_each_steered_request_once_by_its_result() -> None:
    deliveries = DeliveryCounts()
    told(deliveries, "..e", 0.0)
    deliveries.look("m")  # still under way, so it does not count yet
    deliveries.look(None)
    deliveries.note_unreported(None)
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


def test_delivery_share_covers_the_last_minute_and_enough_answers() -> None:
    deliveries = DeliveryCounts()
    told(deliveries, "e" * 19, 0.0)
    assert deliveries.share(0.0) is None
    told(deliveries, ".", 1.0)
    assert deliveries.share(1.0) == 0.05
    told(deliveries, "." * 20, 59.0)
    assert deliveries.share(59.0) == 21 / 40
    assert deliveries.share(61.0) == 1.0
    assert deliveries.share(200.0) is None


def test_delivery_fault_names_its_cause_until_enough_arrive() -> None:
    deliveries = DeliveryCounts()
    told(deliveries, "." * 19 + "e", 0.0)
    assert deliveries.fault(0.0, lambda: "it is not there") == ""
    told(deliveries, "e", 0.0)
    words = deliveries.fault(0.0, lambda: "it is not there")
    assert (
        words == "only 90% of steered requests reached the worker picked for them: it is not there"
    )
    assert RETRIED in deliveries.fault(0.0, str)


def test_has_turned_is_true_once_for_each_change() -> None:
    deliveries = DeliveryCounts()
    turns = []
    for second in range(200):
        told(deliveries, "e." if 20 <= second < 40 else "..", float(second))
        if deliveries.has_turned(float(second)):
            turns.append(second)
    low, well = turns
    assert 20 < low < 30
    assert 40 + 60 < well < 200
    assert not deliveries.has_turned(1000.0)


@given(st.lists(st.tuples(st.sampled_from("ulesn"), st.sampled_from(["m", None])), max_size=40))
def test_delivery_counts_never_fall(steps: list[tuple[str, str | None]]) -> None:
    deliveries, steered, under_way = DeliveryCounts(), Counter[str | None](), Counter[str | None]()
    before: dict[tuple[str, str], int] = {}
    for step, model in steps:
        steered[model] += step in "ul"  # untracked, or looked at from then on
        if step == "l":
            deliveries.look(model)
            under_way[model] += 1
        elif step in "esn" and under_way[model]:
            under_way[model] -= 1
            if step == "n":
                deliveries.note_unreported(model)
            else:
                deliveries.note(model, 0.0, is_elsewhere=step == "e")
        counts = deliveries.counts(steered)
        assert all(counts[result] >= count for result, count in before.items())
        before = counts
    assert sum(before.values()) == sum(steered.values()) - sum(under_way.values())
