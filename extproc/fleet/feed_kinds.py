"""The kinds of sources of a worker's events: how each is configured, opened and named.

Whatever depends on the kind asks its entry in `KINDS`, so that a new kind is one entry more, and a
forgotten one is an error instead of another kind.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from extproc.base import address
from extproc.base.errors import importing_extra
from extproc.config.schema import WorkerEvents
from kvstate.feeds.feed_sources import DrainSource, FeedSource, GrpcSource, ZmqSource
from kvstate.feeds.transport import FeedTransport
from kvstate.feeds.zmq_transport import ZmqTransport

Source = TypeVar("Source", bound=FeedSource)


@dataclass(frozen=True, slots=True)
class FeedKind(Generic[Source]):
    """A kind of source.

    key: the key of `WorkerEvents` that names such a source. made: its type. read: returns it as it
    is configured. open: returns its transports, one for each rank. place: returns where it is, in
    words. is_consumed: whether each event goes to one caller, so that nobody may read along.
    """

    key: str
    made: type[Source]
    read: Callable[[WorkerEvents], Source]
    open: Callable[[Source], Sequence[FeedTransport]]
    place: Callable[[Source], str]
    is_consumed: bool = False


def _zmq(events: WorkerEvents) -> tuple[ZmqSource, ...]:
    return tuple(
        ZmqSource(
            events=_of_rank(events.zmq or "", rank),
            replay=None if events.replay is None else _of_rank(events.replay, rank),
            topic=events.topic,
            binds=events.bind,
            load=None if events.load is None else _of_rank(events.load, rank),
        )
        for rank in range(events.ranks)
    )


def _of_rank(endpoint: str, rank: int) -> str:
    """Returns a rank's endpoint: vLLM and SGLang publish rank r on the configured port + r."""
    place = address.parse_tcp(endpoint)
    return f"tcp://{place._replace(port=place.port + rank)}"


def _open_zmq(source: tuple[ZmqSource, ...]) -> Sequence[FeedTransport]:
    return [ZmqTransport(one, random.random) for one in source]


def _grpc(events: WorkerEvents) -> GrpcSource:
    return GrpcSource(events.grpc or "", events.service, events.ranks)


def _open_grpc(source: GrpcSource) -> Sequence[FeedTransport]:
    with importing_extra("a feed over gRPC", "grpc"):
        from kvstate.feeds.grpc_transport import grpc_transports

    return grpc_transports(source, random.random)


def _drain(events: WorkerEvents) -> DrainSource:
    return DrainSource((events.drain or "").removesuffix("/"), events.ranks)


def _open_drain(source: DrainSource) -> Sequence[FeedTransport]:
    from kvstate.feeds.trtllm_transport import drain_transports

    return drain_transports(source, random.random)


KINDS: tuple[FeedKind[Any], ...] = (
    FeedKind("zmq", tuple, _zmq, _open_zmq, lambda source: source[0].events),
    FeedKind("grpc", GrpcSource, _grpc, _open_grpc, lambda source: source.target),
    FeedKind("drain", DrainSource, _drain, _open_drain, lambda source: source.url, True),
)


def configured(events: WorkerEvents) -> FeedSource:
    """Returns the configured source; the configuration's rules have checked that there is one."""
    (kind,) = [one for one in KINDS if getattr(events, one.key) is not None]
    source: FeedSource = kind.read(events)
    return source


def kind_of(source: FeedSource) -> FeedKind[Any]:
    """Returns the kind of a source."""
    (kind,) = [one for one in KINDS if one.made is type(source)]
    return kind


def open_feed(source: FeedSource) -> Sequence[FeedTransport]:
    """Returns a feed's transports, one for each rank.

    Raises:
        ExtraError: it is a gRPC feed, and grpcio is not installed.
    """
    return kind_of(source).open(source)
