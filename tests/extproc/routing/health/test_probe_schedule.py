import pytest

from extproc.routing.health.probe_schedule import (
    ASKED_AGAIN_SECONDS,
    RETRY_SECONDS,
    SILENT_SECONDS,
    ProbeSchedule,
    SignsOfLife,
)


def test_sound_worker_is_not_probed() -> None:
    one = ProbeSchedule()
    assert not one.is_due(SignsOfLife(), 0.0)
    assert not one.is_due(SignsOfLife(batches=1, in_flight=9), SILENT_SECONDS)
    assert not one.is_due(SignsOfLife(batches=2, in_flight=9), 3 * SILENT_SECONDS)
    assert not one.is_due(SignsOfLife(batches=2), 9 * SILENT_SECONDS)


@pytest.mark.parametrize("signs", [SignsOfLife(is_cut=True), SignsOfLife(is_doubted=True)])
def test_doubted_worker_is_probed_once_until_its_answer_ages(signs: SignsOfLife) -> None:
    one = ProbeSchedule()
    assert [one.is_due(signs, 0.0) for _ in range(3)] == [True, False, False]
    one.end(0.0)
    one.note_life(0.0)
    assert not one.is_due(signs, 0.9 * ASKED_AGAIN_SECONDS)
    assert one.is_due(signs, ASKED_AGAIN_SECONDS)


def test_worker_whose_requests_show_no_progress_is_probed() -> None:
    one = ProbeSchedule()
    assert not one.is_due(SignsOfLife(in_flight=1), 0.0)
    assert one.is_due(SignsOfLife(in_flight=1), 1.1 * SILENT_SECONDS)


def test_finished_probe_is_repeated_after_a_while() -> None:
    one, cut = ProbeSchedule(), SignsOfLife(is_cut=True)
    assert one.is_due(cut, 1.0)
    assert not one.is_due(cut, 2.0)
    one.end(2.0)
    assert not one.is_due(cut, 2.0)
    assert one.is_due(cut, 2.0 + RETRY_SECONDS)
