"""The configuration: one frozen object, validated once; docs/configuration.md lists every key.

Units are in the names: _ms milliseconds, _bytes bytes, _tokens tokens.
`extproc.config_reader` makes it from YAML; a test compares the documentation with the fields here.
"""

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

DIALECTS = ("auto", "buffered")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
SERVICES = ("vllm", "sglang", "trtllm", "tokenspeed")
AUTO = "auto"
POLICIES = ("cost", "cache_aware", "prefix_cache", "least_request", "round_robin", "random")


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
    decisions_percent: int = key(
        "of a hundred decisions, how many are logged with all candidates and costs, as JSON", 0
    )


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

    remote: bool = key(
        "true: workers of the model are asked at POST /tokenize; false is as no tokenizer",
        default=True,
    )
    deadline_ms: int = key(
        "milliseconds until their answer has to be there, then the pick is made by load alone;"
        " extproc.deadline_ms holds besides",
        200,
        minimum=1,
    )
    connections: int = key("connections to each worker at the most", 8, minimum=1)
    cache_bytes: int = key(
        "memory for answers to prompts that come again, in bytes; 0 keeps none", 64 * 1024 * 1024
    )


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
    policy: str | None = key(
        "the rule for this model, instead of policy.name", None, choices=POLICIES
    )


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
        "tokens in one of its cache blocks, until its events tell", None, minimum=1
    )
    events: WorkerEvents | Literal["auto"] | None = key(
        "its event feed; without one it is routed by load; auto asks the worker itself"
        " (/kv_event_sources of vLLM, /server_info of SGLang)",
        None,
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """The weights of policy `cost`."""

    affinity_percent: int = key(
        "what an uncached prompt token costs on an idle fleet, in percent of one that is queued"
        " before the request",
        100,
    )
    busy_affinity_percent: int = key(
        "how much more it costs on a fleet that is half busy or more; higher keeps prompts longer"
        " where their prefix is",
        100,
    )
    running_tokens: int = key("what each request in flight on a worker costs, in tokens", 128)
    uncertain_percent: int = key(
        "what a token in a block that may be there saves, in percent of one that is", 50
    )
    speculative_percent: int = key(
        "the same of a token that is expected since a request with it is under way there", 90
    )
    approximate_percent: int = key(
        "the same of a token that was sent to a worker without events", 90
    )
    prefill_tokens_per_second: int = key(
        "uncached prompt tokens that a worker is taken to compute in a second", 8_000, minimum=1
    )


@dataclass(frozen=True, slots=True)
class CacheAware:
    """The knobs of policy `cache_aware`, as SMG has them."""

    cache_threshold_percent: int = key(
        "the least share of the prompt that a worker must hold to be preferred for it, in percent",
        30,
    )
    balance_abs_requests: int = key(
        "requests that the busiest worker has more than the idlest, before load alone decides", 64
    )
    balance_rel_percent: int = key(
        "and how many times as many it has, in percent: 150 is half as many again", 150
    )


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """The knobs of policy `prefix_cache`, as AIBrix has them."""

    imbalance_requests: int = key(
        "requests that the busiest worker has more than the idlest, before load alone decides", 8
    )
    sigma_percent: int = key(
        "how far above the mean number of requests a worker with a match may be, in percent of the"
        " standard deviation",
        100,
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """How a worker is picked."""

    name: str = key("the rule by which a worker is picked", "cost", choices=POLICIES)
    header: str | None = key(
        "a request header that may name another rule; none is read where this is left out", None
    )
    block_size: int = key(
        "tokens in a cache block, where neither events nor the worker's key tell", 16, minimum=1
    )
    cost: Cost = key("the weights of cost", Cost)
    cache_aware: CacheAware = key("the knobs of cache_aware", CacheAware)
    prefix_cache: PrefixCache = key("the knobs of prefix_cache", PrefixCache)
    speculative_ms: int = key(
        "milliseconds for which blocks of a request under way are expected on its worker", 60_000
    )
    approximate_ms: int = key(
        "milliseconds for which a worker without events is expected to hold what was sent there",
        600_000,
    )
    sent_bytes: int = key(
        "memory for what was sent where, in bytes; about 160 for each of some 40 marks of a prompt"
        " of 8k tokens",
        64 * 1024 * 1024,
        minimum=1024,
    )
    scrape_interval_ms: int = key(
        "milliseconds between two reads of each worker's /metrics; 0 reads none: the router's own"
        " count is enough where it is the only one",
        0,
    )
    max_in_flight: int | None = key(
        "requests in flight above which a worker is picked only if all are", None, minimum=1
    )
    shed: bool = key("true: 429 where all are above max_in_flight", default=False)
    refuse: bool = key("true: 503 where no worker may answer a request", default=False)


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
