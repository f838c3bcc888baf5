from prometheus_client import CollectorRegistry, generate_latest

from extproc.observing.outcomes import Outcome, OutcomeCollector, OutcomeCounts
from extproc.observing.usage import Usage
from tests.extproc.observing.records import records


def shown(collector: OutcomeCollector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def outcome(worker: str) -> Outcome:
    return Outcome("m", worker, True, 200, 0.2, 100, 64, Usage(100, 48), is_comparable=True)


def test_outcome_families_show_every_count() -> None:
    counts = OutcomeCounts(records("w"))
    counts.count(outcome("w"))
    text = shown(OutcomeCollector(counts))
    for line in (
        'kvsteer_responses_total{status="2xx",worker="w"} 1.0',
        'kvsteer_answered_elsewhere_total{model="m"} 1.0',
        'kvsteer_reported_cached_tokens_total{model="m"} 48.0',
        'kvsteer_first_byte_seconds_count{model="m"} 1.0',
        'kvsteer_prediction_error_tokens_sum{model="m",sign="over"} 16.0',
    ):
        assert line in text


def test_outcome_families_drop_a_removed_worker() -> None:
    workers = records("there", "gone")
    counts = OutcomeCounts(workers)
    for worker in ("there", "gone", ""):
        counts.count(outcome(worker))
    assert 'worker="gone"' in shown(OutcomeCollector(counts))
    del workers["gone"]
    text = shown(OutcomeCollector(counts))
    assert 'worker="there"' in text
    assert 'worker=""' in text
    assert 'worker="gone"' not in text


def test_answered_elsewhere_is_shown_by_picked_worker() -> None:
    workers = records("picked", "never")
    for is_elsewhere in (True, True, False):
        workers["picked"].outcomes.answers.note(is_elsewhere=is_elsewhere)
    text = shown(OutcomeCollector(OutcomeCounts(workers)))
    assert 'kvsteer_served_known_total{worker="picked"} 3.0' in text
    assert 'kvsteer_served_elsewhere_total{worker="picked"} 2.0' in text
    assert "never" not in text
