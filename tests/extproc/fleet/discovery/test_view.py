from extproc.config.schema import EventPorts, FoundWorker, WorkerEvents, WorkerSettings
from extproc.fleet.discovery.view import (
    PartReports,
    Sighting,
    SourceReport,
    View,
    doubles,
    listed,
    merged,
    worker_at,
)

A, B = WorkerSettings("10.0.0.1:1"), WorkerSettings("10.0.0.2:1")


def test_merged_holds_all_views_in_the_order_of_sources() -> None:
    fleet = merged({"workers": listed([A]), "file": listed([B])})
    assert [(name, one.source) for name, one in fleet.items()] == [
        ("10.0.0.1:1", "workers"),
        ("10.0.0.2:1", "file"),
    ]


def test_merged_takes_a_worker_from_its_first_source() -> None:
    views = {"workers": listed([A]), "file": [Sighting(A, excluded="not ready"), Sighting(B)]}
    assert merged(views)["10.0.0.1:1"].sighting == Sighting(A)
    assert list(doubles(views)) == [
        ("file", "10.0.0.1:1 is taken from workers, which names it too")
    ]


def test_doubles_are_empty_for_a_single_source() -> None:
    assert list(doubles({"file": listed([A, B])})) == []


def test_worker_at_is_just_its_address_without_events() -> None:
    assert worker_at("::1", 8000, FoundWorker(learn=False)) == WorkerSettings("[::1]:8000")


def test_worker_at_copies_the_values_given_for_all_workers() -> None:
    of_all = FoundWorker(model="m", block_size=32, lora=("x",), events="auto")
    assert worker_at("10.0.0.1", 80, of_all, draining=True) == WorkerSettings(
        "10.0.0.1:80", "m", 32, "auto", ("x",), learn=True, draining=True
    )


def test_worker_at_places_feeds_on_the_address_of_the_worker() -> None:
    of_all = FoundWorker(events=EventPorts(5557, 5657, "kv", ranks=2))
    assert worker_at("10.0.0.1", 8000, of_all).events == WorkerEvents(
        "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657", "kv", ranks=2
    )


def test_worker_at_shifts_ports_by_the_ranks_of_earlier_engines() -> None:
    of_all = FoundWorker(events=EventPorts(5557, ranks=2))
    events = worker_at("10.0.0.1", 8001, of_all, offset=1).events
    assert events == WorkerEvents("tcp://10.0.0.1:5559", ranks=2)


def test_worker_at_names_grpc_and_drained_feeds() -> None:
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
        parts = PartReports(
            SourceReport(self.view, lambda: self.told.append("well"), self.told.append)
        )
        self.pods = parts.viewing("pods")
        self.pool = parts.part_report("pool")

    def view(self, view: View, note: str, fault: str = "") -> None:
        self.told.append(f"view {len(view)} {note} {fault}".rstrip())


def test_part_reports_keep_a_fault_while_other_parts_are_well() -> None:
    heard = Heard()
    heard.pool.fault("no pool")
    heard.pods.confirm()
    heard.pods.view((), "odd")
    heard.pool.confirm()
    heard.pods.view((), "")
    assert heard.told == ["no pool", "view 0 odd no pool", "well", "view 0"]


def test_part_reports_give_a_common_fault_once() -> None:
    heard = Heard()
    heard.pods.fault("away")
    heard.pool.fault("away")
    heard.pool.confirm()
    heard.pods.confirm()
    assert heard.told == ["away", "away", "away", "well"]


def test_part_reports_join_different_faults() -> None:
    heard = Heard()
    heard.pods.fault("no pods")
    heard.pool.fault("no pool")
    assert heard.told == ["no pods", "no pods; no pool"]


def test_part_reports_confirm_only_the_part_that_gives_views() -> None:
    heard = Heard()
    heard.pool.confirm()
    assert heard.told == []
    heard.pods.confirm()
    assert heard.told == ["well"]
