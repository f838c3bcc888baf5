"""What the doctor says of stores that workers share."""

import pytest

from extproc.base.engine import Engine, Release
from extproc.config.schema import Config, DiscoverySettings, WorkerEvents, WorkerSettings
from extproc.config.sections import StoreSettings
from kvtools.doctor.findings import Subject
from kvtools.doctor.shared_stores import judge_mounts, judge_publisher

EVENTS = WorkerEvents(zmq="tcp://127.0.0.1:1")
WORKER = WorkerSettings("a:1", events=EVENTS)
OF_GRPC = WorkerSettings("a:1", events=WorkerEvents(grpc="127.0.0.1:1"))
ALL, ONE, OTHER = (StoreSettings("s", workers) for workers in (None, ("a:1",), ("b:1",)))
BY_MEDIUM = StoreSettings("s", ("a:1",), media=("CPU",))
FOUND = DiscoverySettings(file="workers.yaml")


@pytest.mark.parametrize(
    ("config", "codes"),
    [
        (Config(workers=(WORKER,)), []),
        (Config(workers=(WORKER,), stores=(ALL,)), [""]),
        (Config(workers=(WORKER,), stores=(ONE,)), [""]),
        (Config(workers=(WORKER,), stores=(OTHER,)), ["store-worker"]),
        (Config(stores=(OTHER,), discovery=FOUND), ["store-worker"]),
    ],
)
def test_store_names_workers_that_are_there(config: Config, codes: list[str]) -> None:
    found = [one.code for one in judge_mounts(config, [one.endpoint for one in config.workers])]
    assert found == codes


@pytest.mark.parametrize(
    ("store", "worker", "engine", "codes"),
    [
        (OTHER, WORKER, None, []),
        (ALL, WORKER, None, [""]),
        (ALL, WORKER, Engine("vllm", Release(0, 32)), [""]),
        (ONE, WORKER, Engine("vllm", Release(0, 25)), ["store-engine"]),
        (ONE, WORKER, Engine("sglang", Release(0, 5, 23)), ["store-engine"]),
        (ALL, WORKER, Engine("sglang", Release(0, 5, 23)), [""]),
        (ONE, OF_GRPC, Engine("vllm", Release(0, 32)), ["store-events"]),
        (BY_MEDIUM, OF_GRPC, None, [""]),
        (ONE, WorkerSettings("a:1"), None, ["store-events"]),
        (BY_MEDIUM, WORKER, Engine("sglang", Release(0, 5, 23)), [""]),
    ],
)
def test_worker_that_mounts_a_store_tells_what_it_puts_there(
    store: StoreSettings, worker: WorkerSettings, engine: Engine | None, codes: list[str]
) -> None:
    found = judge_publisher(Config(stores=(store,)), worker, engine, Subject("it"))
    assert [one.code for one in found] == codes
