"""The configuration as dataclasses: each section is one, each key a field made by `key`.

docs/configuration.md lists every key; a test compares it with the fields here.

Units are in the names: _ms milliseconds, _bytes bytes, _tokens tokens.
"""

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

# A number that is larger is a slip of the keyboard; timers and counters have room for these.
MAX_NUMBER = 2**31 - 1
MAX_MS = 366 * 24 * 3600 * 1000
MAX_BYTES = 2**40


def key(
    doc: str,
    default: Any = MISSING,
    *,
    choices: tuple[str, ...] = (),
    minimum: int = 0,
    maximum: int | None = None,
) -> Any:
    """Declares a configuration key: its meaning and unit, its default if any, and what is allowed.

    maximum: where it is less than `most` of the key's name.
    """
    metadata = {"doc": doc, "choices": choices, "minimum": minimum, "maximum": maximum}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def most(name: str) -> int:
    """Returns the largest number that a key of this name accepts."""
    if name.endswith("_ms"):
        return MAX_MS
    return MAX_BYTES if name.endswith("_bytes") else MAX_NUMBER


# Each reads what the one before it does, and more.
RESPONSES = ("none", "headers", "usage")


@dataclass(frozen=True, slots=True)
class Accounting:
    """Whether responses are read; they are never held back, nor changed."""

    responses: str = key(
        "what of responses Envoy shows us: none; headers for status, time to first byte and the"
        " worker that answered; usage for the cached tokens that engines report as well, at a"
        " message for each piece of a response",
        "none",
        choices=RESPONSES,
    )


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
    """Settings shared by all workers of one discovery source."""

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
    """A DNS name whose addresses are workers."""

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


@dataclass(frozen=True, slots=True)
class RouterTls:
    """How Envoy checks the router's certificate and shows its own; PEM files where Envoy runs."""

    ca: str = key("a PEM file: the router's certificate must come from one of these authorities")
    name: str | None = key(
        "the DNS name that the router's certificate must have, and that Envoy asks for (SNI); any"
        " where it is left out",
        None,
    )
    certificate: str | None = key(
        "a PEM file: Envoy's own certificate, where extproc.tls.client_ca asks for one", None
    )
    # last, since it hides the function of that name
    key: str | None = key("a PEM file: the private key of that", None)


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
    router_tls: RouterTls | None = key("TLS to the router; plain text where it is left out", None)
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
    eds_directory: str | None = key(
        "a directory, the same for the router and Envoy, in which the router keeps the addresses of"
        " the workers for Envoy, one file a model; where it is left out, Envoy is told the workers"
        " of this file only",
        None,
    )


DIALECTS = ("auto", "buffered", "epp")
SERVERS = ("lean", "grpcio")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The certificate that the gRPC server shows, and whose clients it accepts; PEM files.

    The files are looked at once a second: new ones are used for new connections.
    """

    certificate: str = key("a PEM file: the certificate, and after it those up to its root")
    client_ca: str | None = key(
        "a PEM file: only clients with a certificate of one of these authorities are let in;"
        " anybody where it is left out",
        None,
    )
    # last, since it hides the function of that name
    key: str = key("a PEM file: the certificate's private key, without a password")


@dataclass(frozen=True, slots=True)
class ExtProc:
    """The gRPC server that Envoy talks to."""

    listen: str = key("address of the gRPC server, host:port or unix:PATH", "127.0.0.1:9002")
    server: str = key(
        "which gRPC server: ours, or grpcio, which is the reference and costs many times its CPU",
        "lean",
        choices=SERVERS,
    )
    dialect: str = key(
        "which protocol proxies may speak: auto takes what each says, and Envoy's BUFFERED body"
        " mode where one says nothing; buffered refuses who speaks the Endpoint Picker Protocol"
        " (FULL_DUPLEX_STREAMED); epp takes who says nothing for one that does",
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
    tls: Tls | None = key(
        "TLS, for a listen that is host:port; plain text where it is left out", None
    )
    socket_mode: str = key(
        "who may connect where listen is unix:PATH, as the mode of chmod in quotes: 0600 the"
        " router's user, 0660 its group too, 0666 anybody",
        "0660",
    )
    drain_ms: int = key(
        "milliseconds that streams under way are given to end when the router is stopped", 5_000
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
        "of a hundred decisions, how many are logged with all candidates and costs, as JSON",
        0,
        maximum=100,
    )


@dataclass(frozen=True, slots=True)
class Events:
    """Whether the workers' events are used at all."""

    enabled: bool = key(
        "false routes by load as if no worker had events; changed at run time by SIGHUP or"
        " POST /events",
        default=True,
    )
    ready_deadline_ms: int = key(
        "milliseconds after which the router says that it is ready though workers have not told all"
        " they hold; what it does not know counts for nothing",
        10_000,
    )
    auto_hosts: tuple[str, ...] = key(
        "hosts where a worker with `events: auto` may say that it publishes, besides its own",
        (),
    )
    auto_ranks: int = key(
        "ranks that such a worker may name; each is a connection, and memory of its own",
        MAX_NAMED_RANKS,
        minimum=1,
        maximum=MAX_RANKS,
    )


POLICIES = ("cost", "cache_aware", "prefix_cache", "least_request", "round_robin", "random")


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
    """The settings of policy `cache_aware`, as SMG has them."""

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
    """The settings of policy `prefix_cache`, as AIBrix has them."""

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
    endpoints: int | None = key(
        "how many endpoints are named to the proxy at most, best first: it retries on the next one."
        " Where it is left out, 3 in the buffered dialect and 1 in the Endpoint Picker Protocol,"
        " most of whose gateways refuse a list (Istio accepts it)",
        None,
        minimum=1,
        maximum=8,
    )
    rank_header: str | None = key(
        "a request header that names the data-parallel rank which holds most of the prompt, to"
        " workers whose ranks share one HTTP port. auto: X-data-parallel-rank, where every worker"
        " with several ranks told them itself (events: auto); none is set with null, and then only"
        " what all ranks of a worker hold is certain",
        "auto",
    )
    block_size: int = key(
        "tokens in a cache block, where neither events nor the worker's key tell; of what was sent"
        " to a worker, whole blocks are expected there",
        16,
        minimum=1,
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
    probe_interval_ms: int | None = key(
        "milliseconds between two GET /health of each worker; what fails two in a row is left out"
        " until it answers one with 2xx. Where this is left out, a worker is asked only while there"
        " is reason to doubt it: its feed is lost, its answers fail, or it gives no sign of life"
        " with requests under way; 0 asks none",
        None,
    )
    max_in_flight: int | None = key(
        "requests in flight above which a worker is picked only if all are", None, minimum=1
    )
    shed: bool = key("true: 429 where all are above max_in_flight", default=False)
    refuse: bool = key("true: 503 where no worker may answer a request", default=False)


@dataclass(frozen=True, slots=True)
class RemoteTokenizer:
    """The /tokenize of the model's workers, instead of files here."""

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
class Config:
    """The configuration as dataclasses: each section is one, each key a field made by `key`."""

    extproc: ExtProc = key("the gRPC server that Envoy talks to", ExtProc)
    admin: Admin = key("the operator's HTTP server", Admin)
    metrics: Metrics = key("the HTTP server for scrapers", Metrics)
    log: Log = key("what is logged", Log)
    log_prompts: bool = key("true puts prompt text into debug logs", default=False)
    events: Events = key("whether the workers' events are used", Events)
    models: tuple[Model, ...] = key("the models served, at least one", ())
    workers: tuple[Worker, ...] = key(
        "the engine servers; at least one, unless discovery finds them", ()
    )
    discovery: Discovery = key("where workers are found that are not listed", Discovery)
    policy: Policy = key("how a worker is picked", Policy)
    accounting: Accounting = key("what is read of responses", Accounting)
    envoy: Envoy = key("what `kvsteer envoy` prints", Envoy)

    def model_of(self, worker: Worker) -> str:
        """Returns the name of the model that a worker serves."""
        return worker.model or self.models[0].name
