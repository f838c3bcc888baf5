"""Checks whether workers can pull from each other (`disaggregation.min_pulled_tokens`)."""

from collections.abc import Iterator, Sequence

from extproc.base.engine import VLLM, Engine
from extproc.config.schema import Config, WorkerSettings
from kvtools.doctor.findings import Finding, Subject

CHECK = "pulls"


def judge_ports(config: Config, workers: Sequence[WorkerSettings]) -> Iterator[Finding]:
    """Yields whether two workers have a port for pulls; nothing if none is to pull."""
    if config.disaggregation.min_pulled_tokens is None:
        return
    about = Subject("configuration")
    able = sum(worker.transfer_port is not None for worker in workers)
    if able < 2:
        yield about.wrong("pull-ports", f"{able} of {len(workers)} workers have a transfer_port")
    else:
        yield about.right(CHECK, f"{able} of {len(workers)} workers have a transfer_port")
    if not config.policy.learn and config.disaggregation.price_pulls:
        says = "policy.learn is off: prefills are priced at policy.cost.prefill_tokens_per_second"
        yield about.note(CHECK, says)


def judge_puller(
    config: Config, worker: WorkerSettings, engine: Engine | None, about: Subject
) -> Iterator[Finding]:
    """Yields whether a worker with a port can pull, and says when; nothing if none is to pull.

    engine: None if it is unknown.
    """
    if config.disaggregation.min_pulled_tokens is None or worker.transfer_port is None:
        return
    if engine is not None and engine.name != VLLM:
        yield about.wrong("pull-engine", f"{engine.name} does not read `remote_kv_source`")
    elif config.disaggregation.price_pulls and worker.events is None:
        says = "without events it is no source of pulls, and its own are not measured"
        yield about.note(CHECK, says)
