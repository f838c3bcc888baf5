import json
import logging
from array import array
from random import Random

import pytest

from extproc.picking.decision import Decision, Query, Snapshot, decide
from extproc.picking.eligibility import Candidate
from extproc.picking.explain import DecisionLog, explanation
from extproc.picking.load import Load
from kvstate.overlap import Prompt


def decision() -> Decision:
    snapshot = Snapshot([Candidate("a", "a:1")], [{}], lambda *_: Load(), "cost", 0)
    return decide(Query("m", [Prompt("m", array("I", range(9)))]), snapshot, 0.0, Random(0))


def written(percent: int, times: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    one = DecisionLog(percent, Random(0).random, lambda _: "live")
    with caplog.at_level(logging.INFO, "kvsteer.decisions"):
        for _ in range(times):
            one.tell(decision())
    return caplog.messages


def test_a_line_is_what_explain_shows(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = written(100, 1, caplog)
    assert json.loads(line) == explanation(decision(), lambda _: "live")
    assert "\n" not in line


def test_by_default_nothing_is_written(caplog: pytest.LogCaptureFixture) -> None:
    assert written(0, 100, caplog) == []


def test_a_sample_is_about_as_large_as_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert 10 <= len(written(20, 100, caplog)) <= 30


def test_a_traced_request_is_named_by_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    one = DecisionLog(100, Random(0).random, lambda _: "live")
    with caplog.at_level(logging.INFO, "kvsteer.decisions"):
        one.tell(decision(), "0af7")
    assert json.loads(caplog.messages[0])["trace_id"] == "0af7"
