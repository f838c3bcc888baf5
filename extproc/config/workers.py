"""The engine servers, and where they tell of their caches."""

from dataclasses import dataclass
from typing import Literal

from extproc.config.key import key

SERVICES = ("vllm", "sglang", "trtllm", "tokenspeed")
AUTO = "auto"

# More than any engine has.
MAX_RANKS = 1_024

# As many may be named by a worker itself, or by a pod's annotation; more have to be configured.
MAX_NAMED_RANKS = 64


@dataclass(frozen=True, slots=True)
class WorkerEvents:
    """Where a worker publishes its KV-cache events: over ZMQ, over gRPC, or to be drained."""

    zmq: str | None = key("the ZMQ PUB endpoint of rank 0, tcp://host:port", None)
    replay: str | None = key(
        "the ZMQ replay endpoint of rank 0, tcp://host:port; without one, what was published"
        " before the connection or lost on it stays unknown",
        None,
    )
    topic: str = key("the topic prefix to subscribe to; empty takes every topic", "")
    bind: bool = key(
        "true: we bind the zmq endpoint and the worker connects to it; one endpoint a worker and"
        " rank, since messages do not name their sender",
        default=False,
    )
    ranks: int = key(
        "publishers inside this worker (data parallel); over ZMQ rank r uses both ports + r",
        1,
        minimum=1,
        maximum=MAX_RANKS,
    )
    grpc: str | None = key(
        "host:port of a gRPC server with SubscribeKvEvents: an engine's own, or `kvsteer bridge`",
        None,
    )
    service: str = key("whose service that is", "vllm", choices=SERVICES)
    drain: str | None = key(
        "http://host:port of a TensorRT-LLM server whose POST /kv_cache_events is drained; nobody"
        " else may drain it",
        None,
    )


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine server."""

    endpoint: str = key("host:port that Envoy sends requests to; IPv6 in brackets")
    model: str | None = key("the model it serves; may be left out when there is one model", None)
    block_size: int | None = key(
        "tokens in one of its cache blocks, until its events tell; of what was sent there, whole"
        " blocks are expected there",
        None,
        minimum=1,
    )
    events: WorkerEvents | Literal["auto"] | None = key(
        "its event feed; without one it is routed by load and by what was sent there; auto asks the"
        " worker itself (/kv_event_sources of vLLM, /server_info of SGLang)",
        None,
    )
    lora: tuple[str, ...] | None = key(
        "the adapters that it serves, [] for none; where it is left out, all of its model's, or"
        " those that it tells",
        None,
    )
    learn: bool = key(
        "true: it is asked for its model, adapters and block size where they are left out here"
        " (/v1/models, /server_info)",
        default=False,
    )
    draining: bool = key("true: it gets no new requests", default=False)
