from extproc.config.schema import EventPorts, FoundWorker, Worker, WorkerEvents
from extproc.discovery.view import (
    Found,
    PartReports,
    Report,
    View,
    doubles,
    listed,
    merged,
    worker_at,
)

A, B = Worker("10.0.0.1:1"), Worker("10.0.0.2:1")


def test_the_fleet_is_all_views_in_the_order_of_sources() -> None:
    fleet = merged({"workers": listed([A]), "file": listed([B])})
    assert [(name, one.source) for name, one in fleet.items()] == [
        ("10.0.0.1:1", "workers"),
        ("10.0.0.2:1", "file"),
    ]


def test_the_first_source_that_names_a_worker_describes_it() -> None:
    views = {"workers": listed([A]), "file": [Found(A, excluded="not ready"), Found(B)]}
    assert merged(views)["10.0.0.1:1"].found == Found(A)
    assert list(doubles(views)) == [
        ("file", "10.0.0.1:1 is taken from workers, which names it too")
    ]


def test_one_source_may_not_double_itself() -> None:
    assert list(doubles({"file": listed([A, B])})) == []


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


class Heard:
    """What was passed on, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        parts = PartReports(Report(self.view, lambda: self.told.append("well"), self.told.append))
        self.pods = parts.viewing("pods")
        self.pool = parts.aside("pool")

    def view(self, view: View, note: str, fault: str = "") -> None:
        self.told.append(f"view {len(view)} {note} {fault}".rstrip())


def test_a_fault_of_one_part_lasts_though_the_others_are_well() -> None:
    heard = Heard()
    heard.pool.fault("no pool")
    heard.pods.confirm()
    heard.pods.view((), "odd")
    heard.pool.confirm()
    heard.pods.view((), "")
    assert heard.told == ["no pool", "view 0 odd no pool", "well", "view 0"]


def test_what_fails_in_all_parts_is_told_in_the_same_words() -> None:
    heard = Heard()
    heard.pods.fault("away")
    heard.pool.fault("away")
    heard.pool.confirm()
    heard.pods.confirm()
    assert heard.told == ["away", "away", "away", "well"]


def test_parts_that_fail_in_different_ways_are_both_told() -> None:
    heard = Heard()
    heard.pods.fault("no pods")
    heard.pool.fault("no pool")
    assert heard.told == ["no pods", "no pods; no pool"]


def test_only_the_part_that_gives_views_confirms_them() -> None:
    heard = Heard()
    heard.pool.confirm()
    assert heard.told == []
    heard.pods.confirm()
    assert heard.told == ["well"]
