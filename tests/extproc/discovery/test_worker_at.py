from extproc.config import EventPorts, FoundWorker, Worker, WorkerEvents
from extproc.discovery.view import worker_at


def test_a_worker_without_events_is_just_its_address() -> None:
    assert worker_at("::1", 8000, FoundWorker(learn=False)) == Worker("[::1]:8000")


def test_all_that_is_said_of_all_is_said_of_each() -> None:
    of_all = FoundWorker(model="m", block_size=32, lora=("x",), events="auto")
    assert worker_at("10.0.0.1", 80, of_all, draining=True) == Worker(
        "10.0.0.1:80", "m", 32, "auto", ("x",), learn=True, draining=True
    )


def test_its_feeds_are_on_its_own_address() -> None:
    of_all = FoundWorker(events=EventPorts(5557, 5657, "kv", ranks=2))
    assert worker_at("10.0.0.1", 8000, of_all).events == WorkerEvents(
        "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657", "kv", ranks=2
    )


def test_the_next_engine_of_a_host_has_the_ports_after_all_ranks_of_the_first() -> None:
    of_all = FoundWorker(events=EventPorts(5557, ranks=2))
    events = worker_at("10.0.0.1", 8001, of_all, offset=1).events
    assert events == WorkerEvents("tcp://10.0.0.1:5559", ranks=2)


def test_grpc_and_drained_feeds_are_named_too() -> None:
    grpc = FoundWorker(events=EventPorts(grpc_port=50051, service="sglang"))
    drained = FoundWorker(events=EventPorts(drain=True))
    assert worker_at("10.0.0.1", 1, grpc).events == WorkerEvents(
        grpc="10.0.0.1:50051", service="sglang"
    )
    assert worker_at("10.0.0.1", 1, drained).events == WorkerEvents(drain="http://10.0.0.1:1")
