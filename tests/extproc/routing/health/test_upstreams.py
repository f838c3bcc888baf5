import math

import pytest

from extproc.routing.health.evidence import RULES, Judge
from extproc.routing.health.upstreams import FAILING, Upstreams

WORKER = "a:1"
RULE = RULES[Judge.ANSWERS]


def upstreams() -> Upstreams:
    one = Upstreams()
    one.enter(WORKER)
    return one


def failing(now: float = 0.0, status: int = 503) -> Upstreams:
    one = upstreams()
    for _ in range(RULE.failures):
        one.note_answer(WORKER, status, now)
    return one


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_endpoint_is_ejected_after_repeated_failures(status: int) -> None:
    one = failing(0.0, status)
    assert list(one.ejections(0.9 * RULE.seconds)) == [WORKER]
    assert not one.ejections(RULE.seconds)


@pytest.mark.parametrize("status", [200, 302, 400, 404, 422])
def test_answered_forgets_failures_after_a_sound_answer(status: int) -> None:
    one = upstreams()
    for _ in range(RULE.failures - 1):
        assert one.note_answer(WORKER, 503, 0.0) is None
    assert one.note_answer(WORKER, status, 0.0) is None
    assert one.note_answer(WORKER, 503, 0.0) is None
    assert not one.ejections(0.0)


def test_ejection_lasts_longer_after_each_failure_of_a_returned_endpoint() -> None:
    one, now, lasted = failing(), RULE.seconds, list[float]()
    for _ in range(8):
        lasted.append(one.note_answer(WORKER, 500, now) or 0.0)
        now += lasted[-1]
    assert lasted[:3] == [2 * RULE.seconds, 4 * RULE.seconds, 8 * RULE.seconds]
    assert lasted[-1] == RULE.max_seconds


def test_answered_ignores_failures_of_an_ejected_endpoint() -> None:
    one = failing()
    assert one.note_answer(WORKER, 503, 0.5 * RULE.seconds) is None
    assert not one.ejections(RULE.seconds)


def test_answered_clears_an_endpoint_that_returns_and_succeeds() -> None:
    one = failing()
    assert one.note_answer(WORKER, 200, RULE.seconds) == 0.0
    assert one.note_answer(WORKER, 503, RULE.seconds) is None


def test_reason_is_given_while_the_ejection_lasts() -> None:
    one = failing()
    assert one.reason(WORKER, 0.9 * RULE.seconds) == FAILING
    assert not one.reason(WORKER, RULE.seconds)
    assert not one.reason("b:1", 0.0)


def test_answered_forgets_old_failures() -> None:
    one = failing()
    assert not one.ejections(RULE.forget_seconds + 0.1)
    assert one.note_answer(WORKER, 503, RULE.forget_seconds + 0.1) is None


def test_endpoint_is_forgotten_with_its_last_worker() -> None:
    one = failing()
    record = one.enter(WORKER)
    one.eject(record, Judge.PROBE, "is not well", 0.0)
    one.leave(record)
    assert one.get(WORKER) is record
    one.leave(record)
    assert (list(one), one.ejections(0.0), one.has_suspects) == ([], {}, False)


def test_reports_about_a_removed_endpoint_change_nothing() -> None:
    one = failing()
    (gone,) = one
    one.eject(gone, Judge.SLEEP, "sleeps", 0.0)
    one.leave(gone)
    assert one.note_answer(WORKER, 503, 0.0) is None
    one.doubt(WORKER, is_doubted=True)
    assert not one.eject(gone, Judge.DOUBTS, "is dead", 0.0)
    assert not one.note_failure(gone, Judge.PROBE, "is not well", 0.0, is_certain=True)
    assert one.restore(gone, Judge.ANSWERS)
    assert (list(one), one.ejections(0.0), one.has_bad) == ([], {}, False)
    assert one.reason(WORKER, 0.0) == ""


def test_ejection_lasts_until_every_judge_restores_the_endpoint() -> None:
    one = failing()
    (record,) = one
    for _ in range(RULES[Judge.SCRAPES].failures):
        one.note_failure(record, Judge.SCRAPES, "does not answer", 0.0)
    one.eject(record, Judge.PROBE, "is not well", 0.0)
    assert one.ejections(0.0) == {WORKER: "is not well"}
    assert one.restore(record, Judge.PROBE)
    assert one.ejections(0.0) == {WORKER: "does not answer"}
    assert one.restore(record, Judge.SCRAPES)
    assert one.ejections(0.0) == {WORKER: FAILING}
    assert not one.restore(record, Judge.SCRAPES)


@pytest.mark.parametrize("judge", sorted(set(Judge) - {Judge.ANSWERS}))
def test_judge_ejects_once_after_failures_in_a_row_until_it_restores(judge: Judge) -> None:
    one, failures = upstreams(), RULES[judge].failures
    (record,) = one
    for _ in range(failures - 1):
        assert not one.note_failure(record, judge, "first", 0.0)
    assert not one.restore(record, judge)
    for number in range(failures):
        assert (record.is_down, record.is_ejected_by(judge, 0.0)) == (False, False)
        ejected = one.note_failure(record, judge, "first", float(number))
    assert ejected == math.inf
    assert not one.note_failure(record, judge, "second", 99.0)
    assert (record.is_down, record.is_ejected_by(judge, 1e9)) == (True, True)
    assert one.ejections(1e9) == {WORKER: "first"}
    assert one.restore(record, judge)
    assert (record.is_down, one.has_bad, one.ejections(0.0)) == (False, False, {})


def test_one_certain_failure_ejects() -> None:
    one = upstreams()
    (record,) = one
    assert one.note_failure(record, Judge.DOUBTS, "refuses", 0.0, is_certain=True) == math.inf
    assert one.reason(WORKER, 9.0) == "refuses"


def test_later_verdict_of_a_judge_replaces_its_reason() -> None:
    one = upstreams()
    (record,) = one
    for reason in ("sleeps at level 1", "sleeps at level 2"):
        assert one.eject(record, Judge.SLEEP, reason, 0.0) == math.inf
        assert one.reason(WORKER, 9.0) == reason


def test_failing_answers_do_not_make_an_endpoint_count_as_down() -> None:
    (record,) = failing()
    assert (record.is_suspect, record.is_ejected_by(Judge.ANSWERS, 0.0)) == (True, True)
    assert (record.is_down, record.is_ejected_by(Judge.ANSWERS, RULE.seconds)) == (False, False)


def test_failures_without_an_ejection_speak_only_for_their_judge() -> None:
    one = upstreams()
    (record,) = one
    assert not one.note_failure(record, Judge.PROBE, "is not well", 0.0)
    assert (record.is_suspect, one.has_bad, one.ejections(0.0)) == (False, False, {})
    assert one.note_answer(WORKER, 200, 0.0) is None
    assert one.note_failure(record, Judge.PROBE, "is not well", 0.0)


def test_ejections_of_an_endpoint_that_fails_for_days_do_not_outgrow_their_limit() -> None:
    one, now = failing(), 0.0
    for _ in range(2_000):
        now += RULE.max_seconds
        assert one.note_answer(WORKER, 503, now)
    assert not one.ejections(now + RULE.max_seconds)


def test_endpoint_is_suspect_while_its_last_answer_is_a_failure() -> None:
    one = failing()
    (record,) = one
    assert (record.is_suspect, one.has_suspects) == (True, True)
    one.note_answer(WORKER, 200, 0.0)
    assert (record.is_suspect, one.has_suspects) == (False, False)


def test_doubt_makes_an_endpoint_suspect_but_does_not_eject_it() -> None:
    one = upstreams()
    (record,) = one
    for is_doubted in (True, False):
        one.doubt(WORKER, is_doubted=is_doubted)
        assert (record.is_suspect, one.has_bad) == (is_doubted, is_doubted)
        assert (list(one.doubts()), one.ejections(0.0)) == ([WORKER] * is_doubted, {})


def test_shared_failure_is_counted_at_an_endpoint_with_a_worker() -> None:
    one = upstreams()
    (record,) = one
    for endpoint in (WORKER, "b:1"):
        one.note_failed_half(endpoint)
    assert (record.failed_halves, one.get("b:1")) == (1, None)
