from typing import Any, get_args

import pytest

from extproc.config.schema import WorkerEvents
from extproc.fleet.feed_kinds import KINDS, configured, kind_of, open_feed
from kvstate.feeds.feed_sources import DrainSource, FeedSource, GrpcSource, ZmqSource


def test_configured_gives_each_rank_both_ports_plus_its_number() -> None:
    events = WorkerEvents("tcp://w:5557", "tcp://w:5657", "t", ranks=2)
    assert configured(events) == (
        ZmqSource("tcp://w:5557", "tcp://w:5657", "t"),
        ZmqSource("tcp://w:5558", "tcp://w:5658", "t"),
    )


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
async def test_each_kind_of_source_is_opened_rank_by_rank_and_named(
    source: FeedSource, place: str, is_consumed: bool
) -> None:
    kind = kind_of(source)
    assert (kind.place(source), kind.is_consumed) == (place, is_consumed)
    transports = open_feed(source)
    assert len(transports) == 2
    for one in transports:
        await one.close()


def test_every_source_has_a_kind_and_what_has_none_is_no_other_kind() -> None:
    assert {kind_of(source).key for source, _, _ in SOURCES} == {kind.key for kind in KINDS}
    assert len(KINDS) == len(get_args(FeedSource))
    unknown: Any = "nats://a:1"
    with pytest.raises(ValueError, match="not enough values"):
        kind_of(unknown)
