from dataclasses import fields
from typing import Any

import pytest

from extproc.base.address import Address
from extproc.base.errors import EXTRAS
from extproc.config.feed_kinds import (
    ADDRESSES,
    FOUND_ADDRESSES,
    KINDS,
    at_address,
    configured,
    found_events,
    kind_found,
    kind_in,
    kind_of,
    kinds_found,
    kinds_in,
    with_port,
)
from extproc.config.schema import EventPorts, WorkerEvents
from kvstate.feeds.feed_sources import DrainSource, FeedSource, GrpcSource, ZmqSource, ranks_of

# What says more about a feed, and names none.
DETAILS = {"topic", "ranks", "service"}


def test_every_key_of_the_schema_belongs_to_a_kind() -> None:
    keys = {one.key for one in ADDRESSES} | {flag for kind in KINDS for flag in kind.flags}
    assert keys | DETAILS == {one.name for one in fields(WorkerEvents)}
    found = {one.found_key for one in FOUND_ADDRESSES}
    assert found | DETAILS == {one.name for one in fields(EventPorts)}
    assert {kind.extra for kind in KINDS} <= {"", *EXTRAS}


def test_configured_gives_each_rank_both_ports_plus_its_number() -> None:
    events = WorkerEvents("tcp://w:5557", "tcp://w:5657", "t", ranks=2)
    assert configured(events) == (
        ZmqSource("tcp://w:5557", "tcp://w:5657", "t"),
        ZmqSource("tcp://w:5558", "tcp://w:5658", "t"),
    )


def test_configured_load_has_a_port_for_each_rank() -> None:
    source = configured(WorkerEvents(zmq="tcp://w:1", load="tcp://w:7000", ranks=2))
    assert isinstance(source, tuple)
    assert [one.load for one in source] == ["tcp://w:7000", "tcp://w:7001"]


def test_configured_feed_may_be_bound_and_without_replay() -> None:
    events = WorkerEvents("tcp://[::1]:5557", bind=True)
    assert configured(events) == (ZmqSource("tcp://[::1]:5557", None, "", binds=True),)


def test_configured_grpc_servers_have_all_ranks() -> None:
    grpc = WorkerEvents(grpc="a:1", service="sglang", ranks=2)
    assert configured(grpc) == GrpcSource("a:1", "sglang", 2)
    assert configured(WorkerEvents(drain="http://a:1/")) == DrainSource("http://a:1", 1)


SOURCES: list[tuple[FeedSource, str, bool]] = [
    ((ZmqSource("tcp://a:1", None, ""), ZmqSource("tcp://a:2", None, "")), "tcp://a:1", False),
    (GrpcSource("a:1", "vllm", 2), "a:1", False),
    (DrainSource("http://a:1", 2), "http://a:1", True),
]


@pytest.mark.parametrize(("source", "place", "is_consumed"), SOURCES)
def test_each_kind_of_source_has_its_place(
    source: FeedSource, place: str, is_consumed: bool
) -> None:
    kind = kind_of(source)
    assert (kind.place(source), kind.is_consumed, ranks_of(source)) == (place, is_consumed, 2)


def test_every_source_has_a_kind_and_what_has_none_is_no_other_kind() -> None:
    assert {kind_of(source).key for source, _, _ in SOURCES} == {kind.key for kind in KINDS}
    unknown: Any = "mqtt://a:1"
    with pytest.raises(ValueError, match="not enough values"):
        kind_of(unknown)


def test_exactly_one_kind_is_configured_or_it_is_none() -> None:
    assert (kinds_in(WorkerEvents()), kinds_found(EventPorts())) == ([], [])
    assert kind_in(WorkerEvents(grpc="a:1")).key == kind_found(EventPorts(grpc_port=1)).key
    both = EventPorts(1, drain=True)
    assert [one.key for one in kinds_found(both)] == ["zmq", "drain"]
    with pytest.raises(ValueError, match="too many values"):
        kind_found(both)


def test_feed_by_the_workers_name_is_at_its_address() -> None:
    events = WorkerEvents(
        zmq="tcp://W.test:5557",
        replay="tcp://other:5657",
        grpc="w.test:50051",
        drain="http://w.test:8/",
    )
    found = at_address(events, "w.test", "fd00::7")
    assert found.zmq == "tcp://[fd00::7]:5557"
    assert found.replay == "tcp://other:5657"
    assert found.grpc == "[fd00::7]:50051"
    assert found.drain == "http://[fd00::7]:8"


def test_endpoint_that_the_router_binds_stays() -> None:
    events = WorkerEvents(zmq="tcp://w.test:5557", replay="tcp://w.test:5657", bind=True)
    found = at_address(events, "w.test", "10.0.0.7")
    assert (found.zmq, found.replay) == ("tcp://w.test:5557", "tcp://10.0.0.7:5657")


def test_discovered_feed_is_at_the_ports_of_an_engine_after_others_on_its_host() -> None:
    place = Address("::1", 8000)
    zmq = EventPorts(5557, 5657, "t", ranks=2)
    assert found_events(zmq, place, 1) == WorkerEvents(
        "tcp://[::1]:5559", "tcp://[::1]:5659", "t", ranks=2
    )
    grpc = EventPorts(grpc_port=50051, ranks=2, service="sglang")
    assert found_events(grpc, place, 1).grpc == "[::1]:50052"
    assert found_events(EventPorts(drain=True), place, 1) == WorkerEvents(drain="http://[::1]:8000")
    last = [[one.last_port(ports, 1) for one in FOUND_ADDRESSES] for ports in (zmq, grpc)]
    assert last == [[5560, 5660, 0, 0, 0], [0, 0, 0, 50052, 0]]


def test_port_of_one_kind_takes_those_of_the_others_away() -> None:
    zmq, grpc, *_ = KINDS
    ports = EventPorts(1, 2, load_port=3, drain=True)
    assert with_port(ports, zmq, 9) == EventPorts(9, 2, load_port=3)
    assert with_port(ports, grpc, 9) == EventPorts(grpc_port=9)
