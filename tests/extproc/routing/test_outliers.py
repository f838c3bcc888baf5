import pytest

from extproc.routing.upstreams import (
    ASKED_AGAIN_SECONDS,
    EJECTED_SECONDS,
    FAILING,
    FAILURES_UNTIL_EJECTED,
    FORGET_SECONDS,
    MAX_EJECTED_SECONDS,
    RETRY_SECONDS,
    SILENT_SECONDS,
    Judge,
    Pulse,
    Upstreams,
    Vital,
)

WORKER = "a:1"


def upstreams() -> Upstreams:
    one = Upstreams()
    one.enter(WORKER)
    return one


def failing(now: float = 0.0, status: int = 503) -> Upstreams:
    one = upstreams()
    for _ in range(FAILURES_UNTIL_EJECTED):
        one.note_answer(WORKER, status, now)
    return one


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_endpoint_is_ejected_after_repeated_failures(status: int) -> None:
    one = failing(0.0, status)
    assert list(one.ejections(0.9 * EJECTED_SECONDS)) == [WORKER]
    assert not one.ejections(EJECTED_SECONDS)


@pytest.mark.parametrize("status", [200, 302, 400, 404, 422])
def test_answered_forgets_failures_after_a_sound_answer(status: int) -> None:
    one = upstreams()
    for _ in range(FAILURES_UNTIL_EJECTED - 1):
        assert one.note_answer(WORKER, 503, 0.0) is None
    assert one.note_answer(WORKER, status, 0.0) is None
    assert one.note_answer(WORKER, 503, 0.0) is None
    assert not one.ejections(0.0)


def test_ejection_lasts_longer_after_each_failure_of_a_returned_endpoint() -> None:
    one, now, lasted = failing(), EJECTED_SECONDS, list[float]()
    for _ in range(8):
        lasted.append(one.note_answer(WORKER, 500, now) or 0.0)
        now += lasted[-1]
    assert lasted[:3] == [2 * EJECTED_SECONDS, 4 * EJECTED_SECONDS, 8 * EJECTED_SECONDS]
    assert lasted[-1] == MAX_EJECTED_SECONDS


def test_answered_ignores_failures_of_an_ejected_endpoint() -> None:
    one = failing()
    assert one.note_answer(WORKER, 503, 0.5 * EJECTED_SECONDS) is None
    assert not one.ejections(EJECTED_SECONDS)


def test_answered_clears_an_endpoint_that_returns_and_succeeds() -> None:
    one = failing()
    assert one.note_answer(WORKER, 200, EJECTED_SECONDS) == 0.0
    assert one.note_answer(WORKER, 503, EJECTED_SECONDS) is None


def test_reason_is_given_while_the_ejection_lasts() -> None:
    one = failing()
    assert one.reason(WORKER, 0.9 * EJECTED_SECONDS) == FAILING
    assert not one.reason(WORKER, EJECTED_SECONDS)
    assert not one.reason("b:1", 0.0)


def test_answered_forgets_old_failures() -> None:
    one = failing()
    assert not one.ejections(FORGET_SECONDS + 0.1)
    assert one.note_answer(WORKER, 503, FORGET_SECONDS + 0.1) is None


def test_endpoint_is_forgotten_with_its_last_worker() -> None:
    one = failing()
    record = one.enter(WORKER)
    one.eject(record, Judge.PROBE, "is not well")
    one.leave(record)
    assert one.get(WORKER) is record
    one.leave(record)
    assert (list(one), one.ejections(0.0), one.has_suspects) == ([], {}, False)


def test_reports_about_a_removed_endpoint_change_nothing() -> None:
    one = failing()
    (gone,) = one
    one.leave(gone)
    assert one.note_answer(WORKER, 503, 0.0) is None
    one.doubt(WORKER, is_doubted=True)
    one.eject(gone, Judge.DOUBTS, "is dead")
    assert not one.fail(gone, Judge.PROBE, 1, "is not well")
    assert not one.restore(gone, Judge.PROBE)
    assert (list(one), one.ejections(0.0), one.has_suspects) == ([], {}, False)
    assert one.reason(WORKER, 0.0) == ""
    assert not one.is_suspect(WORKER)


def test_ejection_lasts_until_every_judge_restores_the_endpoint() -> None:
    one = failing()
    (record,) = one
    assert not one.fail(record, Judge.SCRAPES, 2, "does not answer")
    assert one.fail(record, Judge.SCRAPES, 2, "does not answer")
    assert not one.fail(record, Judge.SCRAPES, 2, "does not answer")
    one.eject(record, Judge.PROBE, "is not well")
    assert one.ejections(0.0) == {WORKER: "is not well"}
    assert one.restore(record, Judge.PROBE)
    assert one.ejections(0.0) == {WORKER: "does not answer"}
    assert one.restore(record, Judge.SCRAPES)
    assert one.ejections(0.0) == {WORKER: FAILING}
    assert not one.restore(record, Judge.SCRAPES)


def asked(vital: Vital, pulse: Pulse, now: float) -> bool:
    return vital.is_due(pulse, now)


def test_vital_probes_no_sound_worker() -> None:
    one = Vital()
    assert not asked(one, Pulse(), 0.0)
    assert not asked(one, Pulse(batches=1, in_flight=9), SILENT_SECONDS)
    assert not asked(one, Pulse(batches=2, in_flight=9), 3 * SILENT_SECONDS)
    assert not asked(one, Pulse(batches=2), 9 * SILENT_SECONDS)


@pytest.mark.parametrize("pulse", [Pulse(is_cut=True), Pulse(is_doubted=True)])
def test_vital_probes_a_doubted_worker_once_until_its_answer_ages(pulse: Pulse) -> None:
    one = Vital()
    assert [asked(one, pulse, 0.0) for _ in range(3)] == [True, False, False]
    assert not one.note_life(0.0)
    assert not asked(one, pulse, 0.9 * ASKED_AGAIN_SECONDS)
    assert asked(one, pulse, ASKED_AGAIN_SECONDS)


def test_vital_probes_a_worker_whose_requests_show_no_progress() -> None:
    one = Vital()
    assert not asked(one, Pulse(in_flight=1), 0.0)
    assert asked(one, Pulse(in_flight=1), 1.1 * SILENT_SECONDS)


def test_vital_takes_one_certain_or_two_other_failures_for_death() -> None:
    for is_certain, dead in ((True, [True, False]), (False, [False, True])):
        one = Vital()
        found = []
        for now in (0.0, RETRY_SECONDS):
            assert asked(one, Pulse(is_cut=True), now)
            found.append(one.note_failure(now, is_certain=is_certain))
        assert found == dead
        assert asked(one, Pulse(), 2 * RETRY_SECONDS)  # only because it is dead
        assert one.note_life(2 * RETRY_SECONDS)
        assert not asked(one, Pulse(), 9.0)


def test_endpoint_is_suspect_while_its_last_answer_is_a_failure() -> None:
    one = failing()
    assert (one.is_suspect(WORKER), one.is_suspect("b:1")) == (True, False)
    one.note_answer(WORKER, 200, 0.0)
    assert not one.is_suspect(WORKER)


def test_vital_repeats_a_finished_probe_after_a_while() -> None:
    one, cut = Vital(), Pulse(is_cut=True)
    assert one.is_due(cut, 1.0)
    assert not one.is_due(cut, 2.0)
    one.end(2.0)
    assert not one.is_due(cut, 2.0)
    assert one.is_due(cut, 2.0 + RETRY_SECONDS)
