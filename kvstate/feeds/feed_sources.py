"""The source of one worker's feed, from which its transport is opened."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class ZmqSource:
    """The endpoints on which one rank publishes; replay is None if it cannot replay.

    load: the endpoint of its load reports (SGLang's --load-publish-endpoint), if any. binds:
    KVSteer binds the endpoint and the publisher connects to it (vLLM connects if its own endpoint
    has no wildcard). Messages name no sender, so each publisher needs its own endpoint.
    """

    events: str
    replay: str | None
    topic: str
    binds: bool = False
    load: str | None = None


@dataclass(frozen=True, slots=True)
class GrpcSource:
    """A gRPC server with SubscribeKvEvents, for all ranks of a worker.

    target: host:port. service: whose service it is: vllm, sglang, trtllm or tokenspeed.
    """

    target: str
    service: str
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class DrainSource:
    """A TensorRT-LLM server whose events are drained, for all ranks; url: http://host:port."""

    url: str
    ranks: int = 1


class SharedSource(Protocol):
    """A source with one connection for all ranks of a worker."""

    @property
    def ranks(self) -> int:
        """How many there are."""


# ZMQ has one source for each rank, in order.
FeedSource: TypeAlias = tuple[ZmqSource, ...] | SharedSource


def ranks_of(source: FeedSource) -> int:
    """Returns how many ranks a source has."""
    return len(source) if isinstance(source, tuple) else source.ranks


class Recovery(StrEnum):
    """How a feed's transport recovers missed batches.

    none: it cannot. replay: it requests them separately from the live stream (ZMQ publishers with a
    replay endpoint). resume: a new connection begins with them, as far as the publisher still has
    them (gRPC). queued: unread batches wait at the publisher (an HTTP drain).
    """

    NONE = "none"
    REPLAY = "replay"
    RESUME = "resume"
    QUEUED = "queued"
