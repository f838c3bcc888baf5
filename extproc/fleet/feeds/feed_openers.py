"""Opens feeds: the transports of each kind of feed (`extproc.config.feed_kinds`)."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from extproc.base.errors import importing_extra
from extproc.config.feed_kinds import kind_of
from kvstate.feeds.feed_sources import DrainSource, FeedSource, GrpcSource, ZmqSource
from kvstate.feeds.transport import FeedTransport
from kvstate.feeds.zmq_transport import ZmqTransport


def _zmq(source: tuple[ZmqSource, ...]) -> Sequence[FeedTransport]:
    return [ZmqTransport(one, random.random) for one in source]


def _grpc(source: GrpcSource) -> Sequence[FeedTransport]:
    with importing_extra("a feed over gRPC", "grpc"):
        from kvstate.feeds.grpc_transport import grpc_transports

    return grpc_transports(source, random.random)


def _drain(source: DrainSource) -> Sequence[FeedTransport]:
    from kvstate.feeds.trtllm_transport import drain_transports

    return drain_transports(source, random.random)


# By the kind's key: returns the transports of a source, one for each rank.
OPENERS: Mapping[str, Callable[[Any], Sequence[FeedTransport]]] = {
    "zmq": _zmq,
    "grpc": _grpc,
    "drain": _drain,
}


def open_feed(source: FeedSource) -> Sequence[FeedTransport]:
    """Returns a feed's transports, one for each rank.

    Raises:
        ExtraError: it is a gRPC feed, and grpcio is not installed.
    """
    return OPENERS[kind_of(source).key](source)
