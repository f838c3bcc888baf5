"""Where workers are found that the configuration does not list."""

from dataclasses import dataclass
from typing import Literal

from extproc.config.key import key
from extproc.config.workers import MAX_RANKS, SERVICES


@dataclass(frozen=True, slots=True)
class EventPorts:
    """Where a worker that was found publishes its events, on its own address."""

    zmq_port: int | None = key("the ZMQ PUB port of rank 0", None, minimum=1)
    replay_port: int | None = key("the ZMQ replay port of rank 0", None, minimum=1)
    topic: str = key("the topic prefix to subscribe to; empty takes every topic", "")
    ranks: int = key(
        "publishers inside each worker (data parallel); rank r uses both ports + r",
        1,
        minimum=1,
        maximum=MAX_RANKS,
    )
    grpc_port: int | None = key(
        "the port of a gRPC server with SubscribeKvEvents, instead of zmq_port", None, minimum=1
    )
    service: str = key("whose service that is", "vllm", choices=SERVICES)
    drain: bool = key(
        "true: POST /kv_cache_events on its HTTP port is drained, instead of zmq_port",
        default=False,
    )


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """What is the same of all workers that one source finds."""

    port: int = key("the port that Envoy sends requests to", 8000, minimum=1)
    model: str | None = key(
        "the model they serve; where it is left out, the only one, or what the worker tells", None
    )
    block_size: int | None = key(
        "tokens in one of their cache blocks, until their events tell; of what was sent there,"
        " whole blocks are expected there",
        None,
        minimum=1,
    )
    lora: tuple[str, ...] | None = key(
        "the adapters they serve, [] for none; where it is left out, what the worker tells", None
    )
    learn: bool = key(
        "whether they are asked for what is left out here (/v1/models, /server_info)", default=True
    )
    events: EventPorts | Literal["auto"] | None = key(
        "their event feeds; without it they are routed by load and by what was sent there; auto"
        " asks each worker itself (/kv_event_sources of vLLM, /server_info of SGLang)",
        None,
    )


@dataclass(frozen=True, slots=True)
class DnsName:
    """A name whose addresses are workers."""

    name: str = key("the name to look up; the hosts file is not read")
    srv: bool = key("true: it is looked up as SRV, whose records tell the ports", default=False)
    interval_ms: int = key(
        "milliseconds between two lookups at the most; a shorter time to live counts, down to 1 s",
        5_000,
        minimum=1_000,
    )
    nameserver: str | None = key(
        "the ip:port of the server to ask; the system's where it is left out", None
    )
    worker: FoundWorker = key("what each of them is", FoundWorker)


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Pods that are workers."""

    namespace: str | None = key("their namespace; our own where it is left out", None)
    selector: str | None = key("the label selector of the pods, such as app=vllm", None)
    inference_pool: str | None = key(
        "the name of an InferencePool, whose selector and targetPorts are taken instead",
        None,
    )
    kubeconfig: str | None = key(
        "the file that tells how to reach the API server; where it is left out, the service"
        " account of our own pod",
        None,
    )
    worker: FoundWorker = key(
        "what each of them is, where labels and annotations do not tell", FoundWorker
    )


@dataclass(frozen=True, slots=True)
class Discovery:
    """Sources of workers beside `workers`, followed while the router runs."""

    file: str | None = key(
        "a YAML file with a list in the form of workers, read again whenever it changes", None
    )
    dns: tuple[DnsName, ...] = key("names whose addresses are workers", ())
    kubernetes: Kubernetes | None = key("pods that are workers", None)
