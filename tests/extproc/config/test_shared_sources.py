import pytest

from extproc.config import Worker, WorkerEvents
from extproc.config.rules import shared_endpoints, shared_feeds


def clashes(*events: WorkerEvents) -> list[str]:
    workers = [Worker(f"a:{port}", events=one) for port, one in enumerate(events, 1)]
    return list(shared_feeds("w", workers))


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("a:1", "a:1", "w: the endpoint a:1 is given 2 times"),
        ("x", "x", "w: the endpoint x is given 2 times"),
        ("localhost:1", "127.0.0.1:1", "w: the endpoints localhost:1 and 127.0.0.1:1 are the same"),
        ("a:1", "A:1", "w: the endpoints a:1 and A:1 are the same"),
        ("[0::1]:1", "[::1]:1", "w: the endpoints [0::1]:1 and [::1]:1 are the same"),
    ],
)
def test_an_endpoint_is_one_workers(one: str, other: str, said: str) -> None:
    assert list(shared_endpoints("w", [Worker(one), Worker("b:1"), Worker(other)])) == [said]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (WorkerEvents("tcp://a:5557"), "zmq: a:5557"),
        (WorkerEvents("tcp://a:5557", topic="t"), "zmq: a:5557"),
        (WorkerEvents("tcp://a:5557", bind=True), "zmq: a:5557"),
        (WorkerEvents(grpc="localhost:1"), "grpc: localhost:1"),
        (WorkerEvents(drain="http://a:1/"), "drain: a:1"),
    ],
)
def test_a_feed_is_one_workers(events: WorkerEvents, said: str) -> None:
    assert clashes(events, events) == [f"w[1].events.{said} is that of w[0] too"]


def test_ranks_that_overlap_are_told_once_a_worker_and_key() -> None:
    first = WorkerEvents("tcp://a:5557", "tcp://a:5657", ranks=4)
    second = WorkerEvents("tcp://a:5559", "tcp://a:5657", ranks=4)
    assert clashes(first, second) == [
        "w[1].events.zmq: a:5559 is that of w[0] too",
        "w[1].events.replay: a:5657 is that of w[0] too",
    ]


def test_feeds_that_differ_are_sound() -> None:
    assert clashes(WorkerEvents("tcp://a:1", ranks=2), WorkerEvents("tcp://a:3", ranks=2)) == []
    assert clashes(WorkerEvents("tcp://a:1"), WorkerEvents("tcp://b:1")) == []
    assert clashes(WorkerEvents("tcp://a:1", topic="x"), WorkerEvents("tcp://a:1", topic="y")) == []
    assert clashes(WorkerEvents(grpc="a:1"), WorkerEvents(grpc="a:1", service="sglang")) == []


def test_what_is_bound_is_one_workers_whatever_its_topic() -> None:
    bound = [WorkerEvents("tcp://a:1", topic=topic, bind=True) for topic in "xy"]
    assert clashes(*bound) == ["w[1].events.zmq: a:1 is that of w[0] too"]


def test_what_is_no_feed_or_no_address_is_left_to_others() -> None:
    wrong = WorkerEvents("a:1", ranks=2)
    workers = [
        Worker("a:1", events="auto"),
        Worker("a:2", events=wrong),
        Worker("a:3", events=wrong),
    ]
    assert list(shared_feeds("w", workers)) == []
    assert clashes(WorkerEvents("tcp://a:65535", ranks=3)) == []
