"""Where the feed of one worker is: what a transport is opened from."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ZmqSource:
    """Where one rank publishes; replay is None where it cannot replay.

    load: where it publishes how much it has to do (SGLang's --load-publish-endpoint), if it does.
    binds: we bind the endpoint and the publisher connects to it (vLLM does so where its own
    endpoint names no wildcard). Messages name no sender, so each needs an endpoint of its own.
    """

    events: str
    replay: str | None
    topic: str
    binds: bool = False
    load: str | None = None


@dataclass(frozen=True, slots=True)
class GrpcSource:
    """A gRPC server with SubscribeKvEvents, for all ranks of a worker.

    target: host:port. service: vllm, sglang, trtllm or tokenspeed, whose service that is.
    """

    target: str
    service: str
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class DrainSource:
    """A TensorRT-LLM server whose events are drained, for all ranks; url: http://host:port."""

    url: str
    ranks: int = 1


# ZMQ has one source a rank, in the order of ranks.
FeedSource: TypeAlias = tuple[ZmqSource, ...] | GrpcSource | DrainSource


class Recovery(StrEnum):
    """How a feed's transport can have what was missed.

    none: not at all.
    replay: asked for apart from the live stream (ZMQ publishers with a replay endpoint).
    resume: a connection begins with it, as far as the publisher still has it (gRPC).
    queued: what was not read yet waits at the publisher (an HTTP drain).
    """

    NONE = "none"
    REPLAY = "replay"
    RESUME = "resume"
    QUEUED = "queued"
