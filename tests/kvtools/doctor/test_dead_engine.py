import pytest

from kvtools.doctor.dead_engine import without_repeats
from kvtools.doctor.findings import Finding, Severity, Subject

ABOUT = Subject("worker 10.0.0.1:8000")
DEAD = ABOUT.wrong("worker-unreachable", "10.0.0.1:8000/health: connection refused")
FEED = ABOUT.wrong("feed-nobody-listens", "tcp://10.0.0.1:5557: connection refused")
REPLAY = ABOUT.wrong("replay-nobody-listens", "tcp://10.0.0.1:5558: connection refused")
GRPC = ABOUT.wrong("grpc-unreachable", "10.0.0.1:9: Connection refused")


def codes(findings: list[Finding]) -> list[str]:
    return [one.code for one in findings]


def test_ports_of_an_engine_that_does_not_run_are_notes() -> None:
    found = without_repeats([DEAD, FEED, REPLAY, GRPC])
    assert codes(found) == ["worker-unreachable", "", "", ""]
    assert [one.verdict for one in found[1:]] == [Severity.NOTE] * 3
    assert found[1].says == FEED.says
    assert not any(one.fix for one in found[1:])


@pytest.mark.parametrize(
    "findings",
    [
        [FEED, REPLAY],
        [DEAD._replace(says="10.0.0.1:8000/health: no answer within 5 s"), FEED],
        [DEAD, FEED, REPLAY._replace(says="tcp://10.0.0.1:5558: no answer within 5 s")],
        [DEAD, FEED._replace(code="feed-not-zmq", says="tcp://10.0.0.1:5557: not ZMQ"), REPLAY],
    ],
)
def test_ports_are_faults_where_the_engine_may_run(findings: list[Finding]) -> None:
    assert without_repeats(findings) == findings
