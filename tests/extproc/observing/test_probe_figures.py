"""The metrics of probes."""

from prometheus_client import CollectorRegistry, generate_latest

from extproc.observing.probe_figures import ANSWERED, BUSY, ProbeFigures


def test_probes_are_counted_by_what_became_of_them_and_timed_if_answered() -> None:
    figures, registry = ProbeFigures(), CollectorRegistry()
    registry.register(figures)
    figures.end(ANSWERED, 0.004)
    figures.end(BUSY, 9.0)
    shown = generate_latest(registry).decode()
    assert 'kvsteer_probes_total{outcome="answered"} 1.0' in shown
    assert 'kvsteer_probes_total{outcome="busy"} 1.0' in shown
    assert 'kvsteer_probe_seconds_bucket{le="0.005"} 1.0' in shown
    assert "kvsteer_probe_seconds_count 1.0" in shown
