"""What the router itself finds wrong, beside what the doctor finds."""

import json

import pytest

from kvtools.doctor.doctor import endpoints_in
from kvtools.doctor.faults import FAULTS
from kvtools.doctor.faults_visit import judge, without_doubles
from kvtools.doctor.findings import Finding, Severity, Subject
from kvtools.doctor.worker_visit import Answer

WORKER = "worker 10.0.0.1:8000"


def seen(code: str, subject: str = WORKER) -> Finding:
    return Finding(subject, "router", Severity.WRONG, "says", code, "fix")


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("worker-down", "worker-unreachable"),
        ("feed-not-live", "feed-nobody-listens"),
        ("feed-not-live", "rank-missing"),
        ("block-size-differs", "block-size"),
    ],
)
def test_fault_that_another_check_names_is_told_once(own: str, other: str) -> None:
    assert other in FAULTS
    assert without_doubles([seen(own)], [Subject(WORKER).wrong(other, "")]) == []
    elsewhere = [Subject("worker 10.0.0.2:8000").wrong(other, ""), Subject(WORKER).note("x", "")]
    assert without_doubles([seen(own)], elsewhere) == [seen(own)]


def test_fault_of_the_router_is_told_once_whatever_the_other_is_about() -> None:
    own = [seen("paths-unrecognized", "router")]
    assert without_doubles(own, [Subject("envoy e").wrong("envoy-path-rewritten", "")]) == []
    assert without_doubles(own, [Subject("envoy e").wrong("envoy-path", "")]) == own


def test_what_is_right_stays() -> None:
    (right,) = judge(Answer(200, b"[]"))
    assert without_doubles([right], [Subject(WORKER).wrong("feed-silent", "")]) == [right]


def test_endpoints_are_those_that_the_router_uses() -> None:
    shown = [{"name": "w:1", "endpoint": "10.0.0.2:1", "more": 1}, {"name": "x", "endpoint": "y"}]
    assert endpoints_in(json.dumps(shown).encode()) == {"w:1": "10.0.0.2:1"}


@pytest.mark.parametrize("answer", [b"", b"{}", b"[1]", b'[{"name": 1, "endpoint": 2}]'])
def test_answer_that_cannot_be_read_names_no_endpoint(answer: bytes) -> None:
    assert endpoints_in(answer) == {}
