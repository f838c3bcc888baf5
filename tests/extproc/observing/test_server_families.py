from prometheus_client import CollectorRegistry, generate_latest

from extproc.observing.fleet_families import ServerCollector, ServerFigures


def test_server_figures_are_shown_at_every_scrape() -> None:
    registry = CollectorRegistry()
    figures = ServerFigures(2, {"PROTOCOL_ERROR": 3}, 4096)
    registry.register(ServerCollector(lambda: figures))
    text = generate_latest(registry).decode()
    assert "kvsteer_connections 2.0" in text
    assert 'kvsteer_connection_faults_total{code="PROTOCOL_ERROR"} 3.0' in text
    assert "kvsteer_connection_held_bytes 4096.0" in text
