"""Whether the doctor finds engines that do not schedule by priority."""

import json
from typing import Any

import pytest

from extproc.base.engine import Engine, Release
from kvtools.doctor.findings import Severity, Subject
from kvtools.doctor.priority_visit import judge_scheduling

ABOUT = Subject("worker")
VLLM, SGLANG = Engine("vllm", Release(0, 32)), Engine("sglang", Release(0, 5, 23))
TRTLLM = Engine("trtllm", Release(1, 0))
WAITS = "there, all classes wait alike"


def of_policy(name: str) -> dict[str, Any]:
    return {"vllm_config": {"scheduler_config": {"policy": name}}, "vllm_env": {}}


@pytest.mark.parametrize(
    ("engine", "info", "verdict", "code"),
    [
        (VLLM, of_policy("priority"), Severity.RIGHT, ""),
        (VLLM, of_policy("fcfs"), Severity.WRONG, "priority-off"),
        (VLLM, {"vllm_config": {}}, Severity.NOTE, ""),
        (VLLM, None, Severity.NOTE, ""),
        (VLLM, {"vllm_config": "text"}, Severity.NOTE, ""),
        (SGLANG, {"enable_priority_scheduling": True}, Severity.RIGHT, ""),
        (SGLANG, {"enable_priority_scheduling": False}, Severity.WRONG, "priority-off"),
        (SGLANG, {}, Severity.NOTE, ""),
        (
            SGLANG,
            {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True},
            Severity.WRONG,
            "priority-inverted",
        ),
        (TRTLLM, None, Severity.WRONG, "priority-off"),
        (None, None, Severity.NOTE, ""),
    ],
)
def test_engine_has_to_schedule_by_priority(
    engine: Engine | None, info: dict[str, Any] | None, verdict: Severity, code: str
) -> None:
    body = b"" if info is None else json.dumps(info).encode()
    finding, *_ = judge_scheduling(ABOUT, engine, body)
    assert (finding.verdict, finding.code) == (verdict, code)


@pytest.mark.parametrize(
    ("engine", "paths"),
    [
        (VLLM, ""),
        (Engine("vllm", Release(0, 20)), "/v1/messages"),
        (SGLANG, "/v1/responses, /v1/messages"),
    ],
)
def test_apis_on_which_an_engine_reads_no_priority_are_named(engine: Engine, paths: str) -> None:
    said = [one.says for one in judge_scheduling(ABOUT, engine, b"")][1:]
    assert said == ([f"{engine} reads no priority on {paths}: {WAITS}"] if paths else [])
