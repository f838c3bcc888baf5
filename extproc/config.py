"""The configuration: one frozen object, validated once; docs/configuration.md lists every key.

Units are in the names: _ms milliseconds, _bytes bytes, _tokens tokens.
`extproc.config_reader` makes it from YAML; a test compares the documentation with the fields here.
"""

from dataclasses import MISSING, dataclass, field
from typing import Any

DIALECTS = ("auto", "buffered")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
SERVICES = ("vllm", "sglang", "trtllm")
POLICIES = ("cost", "least_request", "round_robin", "random")


def key(
    doc: str, default: Any = MISSING, *, choices: tuple[str, ...] = (), minimum: int = 0
) -> Any:
    """A configuration key: its meaning and unit, its default if any, and what is allowed."""
    metadata = {"doc": doc, "choices": choices, "minimum": minimum}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ExtProc:
    """The gRPC server that Envoy talks to."""

    listen: str = key("address of the gRPC server, host:port or unix:PATH", "127.0.0.1:9002")
    dialect: str = key(
        "protocol spoken where the proxy does not say which; auto and buffered are Envoy's BUFFERED"
        " body mode",
        "auto",
        choices=DIALECTS,
    )
    deadline_ms: int = key(
        "milliseconds a decision may take, then the pick is made by load alone; must be below"
        " envoy.message_timeout_ms",
        250,
        minimum=1,
    )
    max_body_bytes: int = key(
        "largest request body that is read, in bytes; larger ones are routed by load on their"
        " headers, and prompts in bodies over 4 MiB by load as well",
        32 * 1024 * 1024,
        minimum=1024,
    )


@dataclass(frozen=True, slots=True)
class Admin:
    """The operator's HTTP server: /workers, /explain, /events."""

    listen: str = key(
        "address of the admin server, host:port; keep it on loopback", "127.0.0.1:9090"
    )


@dataclass(frozen=True, slots=True)
class Metrics:
    """The HTTP server for scrapers: /metrics, /healthz, /readyz."""

    listen: str = key("address of the metrics server, host:port", "127.0.0.1:9091")


@dataclass(frozen=True, slots=True)
class Log:
    """What is logged, to standard error."""

    level: str = key("least severity that is logged", "info", choices=LOG_LEVELS)
    format: str = key("one line of text, or one JSON object, a record", "text", choices=LOG_FORMATS)


@dataclass(frozen=True, slots=True)
class Events:
    """Whether the workers' events are used at all."""

    enabled: bool = key(
        "false routes by load as if no worker had events; changed at run time by SIGHUP or"
        " POST /events",
        default=True,
    )


@dataclass(frozen=True, slots=True)
class RemoteTokenizer:
    """A worker's own /tokenize instead of files here."""

    remote: bool = key("true: a worker's /tokenize; this version does not ask it yet", default=True)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as requests name it, and how its prompts become tokens."""

    name: str = key("the name that requests use")
    aliases: tuple[str, ...] = key("other names for the same model", ())
    lora: tuple[str, ...] = key("adapter names that requests may use as the model", ())
    tokenizer: str | RemoteTokenizer | None = key(
        "a directory, a tokenizer.json, a hub id found in the local Hugging Face cache, or"
        " {remote: true}; without one here the model is routed by load",
        None,
    )
    chat_template: str | None = key(
        "a Jinja file used instead of the model's own chat template", None
    )


@dataclass(frozen=True, slots=True)
class WorkerEvents:
    """Where a worker publishes its KV-cache events: over ZMQ, or over gRPC."""

    zmq: str | None = key("the ZMQ PUB endpoint of rank 0, tcp://host:port", None)
    replay: str | None = key(
        "the ZMQ replay endpoint of rank 0, tcp://host:port; without one, what was published"
        " before the connection or lost on it stays unknown",
        None,
    )
    topic: str = key("the topic prefix to subscribe to; empty takes every topic", "")
    ranks: int = key(
        "publishers inside this worker (data parallel); rank r uses both ports + r", 1, minimum=1
    )
    grpc: str | None = key(
        "host:port of a gRPC server with SubscribeKvEvents; this version does not follow it yet,"
        " and routes the worker by load",
        None,
    )
    service: str = key("whose service that is", "vllm", choices=SERVICES)


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine server."""

    endpoint: str = key("host:port that Envoy sends requests to; IPv6 in brackets")
    model: str | None = key("the model it serves; may be left out when there is one model", None)
    block_size: int | None = key(
        "tokens in one of its cache blocks, until its events tell", None, minimum=1
    )
    events: WorkerEvents | None = key("its event feed; without one it is routed by load", None)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a worker is picked."""

    name: str = key("the rule by which a worker is picked", "cost", choices=POLICIES)
    block_size: int = key(
        "tokens in a cache block, where neither events nor the worker's key tell", 16, minimum=1
    )


@dataclass(frozen=True, slots=True)
class Envoy:
    """What `kvsteer envoy` prints; the router itself uses the limits to check its own."""

    listen: str = key("address Envoy serves clients on, ip:port", "127.0.0.1:10000")
    admin: str = key("address of Envoy's own admin server, ip:port", "127.0.0.1:9901")
    router: str | None = key(
        "address under which Envoy reaches the router, host:port or unix:PATH; extproc.listen"
        " where it is left out",
        None,
    )
    message_timeout_ms: int = key(
        "milliseconds Envoy waits for each of our answers before it goes on without us",
        500,
        minimum=1,
    )
    request_body_buffer_limit_bytes: int = key(
        "largest request body in bytes that Envoy can hold for us and for retries",
        32 * 1024 * 1024,
        minimum=1024,
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration."""

    extproc: ExtProc = key("the gRPC server that Envoy talks to", ExtProc)
    admin: Admin = key("the operator's HTTP server", Admin)
    metrics: Metrics = key("the HTTP server for scrapers", Metrics)
    log: Log = key("what is logged", Log)
    log_prompts: bool = key("true puts prompt text into debug logs", default=False)
    events: Events = key("whether the workers' events are used", Events)
    models: tuple[Model, ...] = key("the models served, at least one", ())
    workers: tuple[Worker, ...] = key("the engine servers, at least one", ())
    policy: Policy = key("how a worker is picked", Policy)
    envoy: Envoy = key("what `kvsteer envoy` prints", Envoy)

    def model_of(self, worker: Worker) -> str:
        """The name of the model that a worker serves."""
        return worker.model or self.models[0].name
