"""Asks a worker whether its engine schedules by priority, which `policy.classes` needs.

SGLang says it in `/server_info` (0.5.23, its server arguments). vLLM says it there only in its
development mode (0.32, `entrypoints/serve/dev/server_info`).
"""

from collections.abc import Iterator

import msgspec

from extproc.base.engine import SGLANG, VLLM, Engine
from extproc.config.schema import WorkerSettings
from extproc.routing.priorities import apis_without_priority
from kvstate.undecodable import UNDECODABLE
from kvtools.doctor.findings import Finding, Subject
from kvtools.doctor.worker_visit import VisitTools, WorkerReport

CHECK = "classes"
PATH = "/server_info?config_format=json"


class _SchedulerConfig(msgspec.Struct):
    policy: str | None = None


class _VllmConfig(msgspec.Struct):
    scheduler_config: _SchedulerConfig = msgspec.field(default_factory=_SchedulerConfig)


class _SchedulingInfo(msgspec.Struct):
    vllm_config: _VllmConfig = msgspec.field(default_factory=_VllmConfig)
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None


async def visit(
    tools: VisitTools, worker: WorkerSettings, visited: WorkerReport, about: Subject
) -> list[Finding]:
    """Returns the findings about a worker's scheduling; none without classes."""
    if tools.config.policy.classes is None:
        return []
    answer = await tools.web.get(f"http://{worker.endpoint}{PATH}")
    return list(judge_scheduling(about, visited.engine, answer.body if answer.is_ok else b""))


def judge_scheduling(about: Subject, engine: Engine | None, info: bytes) -> Iterator[Finding]:
    """Yields whether an engine schedules by priority.

    engine: None if it is unknown. info: its answer to /server_info; b"" if missing.
    """
    if engine is None:
        yield about.note(CHECK, "not checked: the worker does not tell its engine and release")
        return
    if engine.name not in (VLLM, SGLANG):
        yield about.wrong("priority-off", f"{engine.name} reads no priority of a request")
        return
    yield from _judge_policy(about, engine, info)
    without = apis_without_priority(engine)
    if without:
        says = f"{engine} reads no priority on {', '.join(without)}: there, all classes wait alike"
        yield about.note(CHECK, says)


def _judge_policy(about: Subject, engine: Engine, info: bytes) -> Iterator[Finding]:
    try:
        answer = msgspec.json.decode(info, type=_SchedulingInfo)
    except UNDECODABLE:
        answer = _SchedulingInfo()
    policy, is_on = answer.vllm_config.scheduler_config.policy, answer.enable_priority_scheduling
    if engine.name == VLLM and policy is not None:
        is_on = policy == "priority"
    if is_on is None:
        says = "not checked: the engine does not say whether it schedules by priority"
        needs = " (vLLM does only with VLLM_SERVER_DEV_MODE=1)" if engine.name == VLLM else ""
        yield about.note(CHECK, says + needs)
    elif not is_on:
        yield about.wrong(
            "priority-off", "the engine does not schedule by priority: all wait alike"
        )
    elif answer.schedule_low_priority_values_first:
        says = "schedule_low_priority_values_first is set: the highest class would go last"
        yield about.wrong("priority-inverted", says)
    else:
        yield about.right(CHECK, "the engine schedules by priority")
