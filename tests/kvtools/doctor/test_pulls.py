"""What the doctor says of workers that pull from each other."""

import pytest

from extproc.base.engine import Engine, Release
from extproc.config.schema import Config, Policy, WorkerEvents, WorkerSettings
from extproc.config.sections import Disaggregation
from kvtools.doctor.findings import Severity, Subject
from kvtools.doctor.pulls import judge_ports, judge_puller

PULLS = Disaggregation(connector="offloading", min_pulled_tokens=1_024, price_pulls=True)
OFF, ON = Config(), Config(disaggregation=PULLS)
EVENTS = WorkerEvents(zmq="tcp://127.0.0.1:1")
WITH, WITHOUT = WorkerSettings("a:1", transfer_port=5710, events=EVENTS), WorkerSettings("b:1")


@pytest.mark.parametrize(
    ("config", "workers", "codes"),
    [
        (OFF, [WITHOUT], []),
        (ON, [WITH, WITHOUT], ["pull-ports"]),
        (ON, [WITH, WITH], [""]),
        (Config(disaggregation=PULLS, policy=Policy(learn=False)), [WITH, WITH], ["", ""]),
    ],
)
def test_pulls_need_two_workers_with_a_port(
    config: Config, workers: list[WorkerSettings], codes: list[str]
) -> None:
    assert [one.code for one in judge_ports(config, workers)] == codes


@pytest.mark.parametrize(
    ("config", "worker", "engine", "verdicts"),
    [
        (OFF, WITH, "sglang", []),
        (ON, WITHOUT, "sglang", []),
        (ON, WITH, "sglang", [Severity.WRONG]),
        (ON, WITH, "vllm", []),
        (ON, WITH, None, []),
        (ON, WorkerSettings("a:1", transfer_port=1), "vllm", [Severity.NOTE]),
    ],
)
def test_puller_is_a_vllm_with_events(
    config: Config, worker: WorkerSettings, engine: str | None, verdicts: list[Severity]
) -> None:
    known = None if engine is None else Engine(engine, Release(0, 32))
    found = judge_puller(config, worker, known, Subject("it"))
    assert [one.verdict for one in found] == verdicts
