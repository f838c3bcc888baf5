import json
import logging
from array import array
from random import Random

import pytest

from extproc.requests.request import PLAIN_REQUEST, Head
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.decision_log import DecisionLog
from extproc.routing.explain import explanation
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from kvstate.overlap import Prompt


def decision() -> Decision:
    snapshot = Snapshot([Candidate("a", "a:1")], [{}], lambda *_: Load(), "cost", 0)
    return decide(
        PLAIN_REQUEST, Query("m", [Prompt("m", array("I", range(9)))]), snapshot, 0.0, Random(0)
    )


def written(percent: int, times: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    one = DecisionLog(percent, Random(0).random, lambda _: "live")
    with caplog.at_level(logging.INFO, "kvsteer.decisions"):
        for _ in range(times):
            one.tell(decision())
    return caplog.messages


def test_decision_log_line_equals_the_explanation(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = written(100, 1, caplog)
    assert json.loads(line) == explanation(decision(), lambda _: "live")
    assert "\n" not in line


def test_decision_log_writes_nothing_by_default(caplog: pytest.LogCaptureFixture) -> None:
    assert written(0, 100, caplog) == []


def test_decision_log_writes_about_the_configured_share(caplog: pytest.LogCaptureFixture) -> None:
    assert 10 <= len(written(20, 100, caplog)) <= 30


@pytest.mark.parametrize(("given", "trace"), [("0af7", "0af7"), ("", "ab" * 16)])
def test_decision_log_names_trace_and_id_of_a_request(
    given: str, trace: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = DecisionLog(100, Random(0).random, lambda _: "live")
    head = Head("", "", None, request_id="9f3c", traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    with caplog.at_level(logging.INFO, "kvsteer.decisions"):
        one.tell(decision(), head, given)
    told = json.loads(caplog.messages[0])
    assert (told["trace_id"], told["request_id"]) == (trace, "9f3c")
    assert caplog.records[0].__dict__["decision"] == told
