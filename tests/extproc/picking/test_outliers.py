import pytest

from extproc.picking.upstreams import (
    ASKED_AGAIN_SECONDS,
    FAILING,
    FAILURES_UNTIL_LEFT_OUT,
    FORGET_SECONDS,
    LEFT_OUT_SECONDS,
    MAX_LEFT_OUT_SECONDS,
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
    for _ in range(FAILURES_UNTIL_LEFT_OUT):
        one.answered(WORKER, status, now)
    return one


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_an_endpoint_that_fails_again_and_again_is_left_out(status: int) -> None:
    one = failing(0.0, status)
    assert list(one.ejected(0.9 * LEFT_OUT_SECONDS)) == [WORKER]
    assert not one.ejected(LEFT_OUT_SECONDS)


@pytest.mark.parametrize("status", [200, 302, 400, 404, 422])
def test_any_other_answer_between_shows_that_it_is_sound(status: int) -> None:
    one = upstreams()
    for _ in range(FAILURES_UNTIL_LEFT_OUT - 1):
        assert one.answered(WORKER, 503, 0.0) is None
    assert one.answered(WORKER, status, 0.0) is None
    assert one.answered(WORKER, 503, 0.0) is None
    assert not one.ejected(0.0)


def test_each_failure_of_one_that_comes_back_leaves_it_out_for_longer() -> None:
    one, now, lasted = failing(), LEFT_OUT_SECONDS, list[float]()
    for _ in range(8):
        lasted.append(one.answered(WORKER, 500, now) or 0.0)
        now += lasted[-1]
    assert lasted[:3] == [2 * LEFT_OUT_SECONDS, 4 * LEFT_OUT_SECONDS, 8 * LEFT_OUT_SECONDS]
    assert lasted[-1] == MAX_LEFT_OUT_SECONDS


def test_failures_of_what_was_sent_before_it_was_left_out_change_nothing() -> None:
    one = failing()
    assert one.answered(WORKER, 503, 0.5 * LEFT_OUT_SECONDS) is None
    assert not one.ejected(LEFT_OUT_SECONDS)


def test_one_that_comes_back_and_answers_begins_anew() -> None:
    one = failing()
    assert one.answered(WORKER, 200, LEFT_OUT_SECONDS) == 0.0
    assert one.answered(WORKER, 503, LEFT_OUT_SECONDS) is None


def test_it_is_told_of_one_endpoint_as_long_as_it_lasts() -> None:
    one = failing()
    assert one.reason(WORKER, 0.9 * LEFT_OUT_SECONDS) == FAILING
    assert not one.reason(WORKER, LEFT_OUT_SECONDS)
    assert not one.reason("b:1", 0.0)


def test_failures_of_long_ago_are_forgotten() -> None:
    one = failing()
    assert not one.ejected(FORGET_SECONDS + 0.1)
    assert one.answered(WORKER, 503, FORGET_SECONDS + 0.1) is None


def test_an_endpoint_is_forgotten_with_its_last_worker() -> None:
    one = failing()
    record = one.enter(WORKER)
    one.eject(record, Judge.PROBE, "is not well")
    one.leave(record)
    assert one.get(WORKER) is record
    one.leave(record)
    assert (list(one), one.ejected(0.0), one.has_suspects) == ([], {}, False)


def test_what_is_told_of_an_endpoint_that_is_gone_changes_nothing() -> None:
    one = failing()
    (gone,) = one
    one.leave(gone)
    assert one.answered(WORKER, 503, 0.0) is None
    one.doubt(WORKER, is_doubted=True)
    one.eject(gone, Judge.DOUBTS, "is dead")
    assert not one.fail(gone, Judge.PROBE, 1, "is not well")
    assert not one.restore(gone, Judge.PROBE)
    assert (list(one), one.ejected(0.0), one.has_suspects) == ([], {}, False)
    assert one.reason(WORKER, 0.0) == ""
    assert not one.is_suspect(WORKER)


def test_an_endpoint_is_ejected_for_one_reason_until_each_who_said_so_finds_it_well() -> None:
    one = failing()
    (record,) = one
    assert not one.fail(record, Judge.SCRAPES, 2, "does not answer")
    assert one.fail(record, Judge.SCRAPES, 2, "does not answer")
    assert not one.fail(record, Judge.SCRAPES, 2, "does not answer")
    one.eject(record, Judge.PROBE, "is not well")
    assert one.ejected(0.0) == {WORKER: "is not well"}
    assert one.restore(record, Judge.PROBE)
    assert one.ejected(0.0) == {WORKER: "does not answer"}
    assert one.restore(record, Judge.SCRAPES)
    assert one.ejected(0.0) == {WORKER: FAILING}
    assert not one.restore(record, Judge.SCRAPES)


def asked(vital: Vital, pulse: Pulse, now: float) -> bool:
    return vital.is_due(pulse, now)


def test_a_sound_worker_is_asked_nothing() -> None:
    one = Vital()
    assert not asked(one, Pulse(), 0.0)
    assert not asked(one, Pulse(batches=1, in_flight=9), SILENT_SECONDS)
    assert not asked(one, Pulse(batches=2, in_flight=9), 3 * SILENT_SECONDS)
    assert not asked(one, Pulse(batches=2), 9 * SILENT_SECONDS)


@pytest.mark.parametrize("pulse", [Pulse(is_cut=True), Pulse(is_doubted=True)])
def test_one_in_doubt_is_asked_once_and_some_time_after_its_answer_again(pulse: Pulse) -> None:
    one = Vital()
    assert [asked(one, pulse, 0.0) for _ in range(3)] == [True, False, False]
    assert not one.alive(0.0)
    assert not asked(one, pulse, 0.9 * ASKED_AGAIN_SECONDS)
    assert asked(one, pulse, ASKED_AGAIN_SECONDS)


def test_one_that_has_requests_and_shows_no_life_is_asked() -> None:
    one = Vital()
    assert not asked(one, Pulse(in_flight=1), 0.0)
    assert asked(one, Pulse(in_flight=1), 1.1 * SILENT_SECONDS)


def test_a_certain_failure_proves_death_and_two_others_do() -> None:
    for is_certain, dead in ((True, [True, False]), (False, [False, True])):
        one = Vital()
        found = []
        for now in (0.0, RETRY_SECONDS):
            assert asked(one, Pulse(is_cut=True), now)
            found.append(one.failed(now, is_certain=is_certain))
        assert found == dead
        assert asked(one, Pulse(), 2 * RETRY_SECONDS)  # only because it is dead
        assert one.alive(2 * RETRY_SECONDS)
        assert not asked(one, Pulse(), 9.0)


def test_one_whose_last_answer_was_a_failure_is_doubted() -> None:
    one = failing()
    assert (one.is_suspect(WORKER), one.is_suspect("b:1")) == (True, False)
    one.answered(WORKER, 200, 0.0)
    assert not one.is_suspect(WORKER)
