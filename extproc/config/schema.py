"""The configuration as dataclasses: each section is one, each key a field made by `key`.

docs/configuration.md lists every key; a test compares it with the fields here.
Units are in the names: _ms milliseconds, _bytes bytes, _tokens tokens.
"""

from dataclasses import dataclass
from typing import Literal

from extproc.base.engine import ENGINES, Engine, release_of
from extproc.config.sections import (
    ROLES,
    CacheAware,
    Classes,
    Disaggregation,
    Isolation,
    Log,
    PrefixCacheSettings,
    RecorderSettings,
    ReportSettings,
    Routers,
    RouterTls,
    SharingSettings,
    State,
    SteeringSettings,
    StoreSettings,
    key,
)

# Each value includes the ones before it.
RESPONSES = ("none", "headers", "usage")


@dataclass(frozen=True, slots=True)
class Accounting:
    """Which parts of responses are read: Envoy holds each until KVSteer lets it pass unchanged."""

    responses: str = key(
        "which parts of responses Envoy sends to KVSteer: none; headers (status, time to first"
        " byte, who answered); usage (cached tokens too; a message per chunk)",
        "none",
        choices=RESPONSES,
    )


SERVICES = ("vllm", "sglang", "trtllm", "tokenspeed")
AUTO = "auto"

# More ranks than any engine has.
MAX_RANKS = 1_024

# Most ranks that a worker itself, or a pod's annotation, may report; more must be configured.
MAX_NAMED_RANKS = 64


@dataclass(frozen=True, slots=True)
class WorkerEvents:
    """Where a worker publishes its KV-cache events: over ZMQ, over gRPC, or in a queue to drain."""

    zmq: str | None = key("the ZMQ PUB endpoint of rank 0, tcp://host:port", None)
    replay: str | None = key(
        "the ZMQ replay endpoint of rank 0, tcp://host:port; without one, events published before"
        " KVSteer connected, or lost later, cannot be recovered",
        None,
    )
    topic: str = key("the topic prefix to subscribe to; empty subscribes to every topic", "")
    bind: bool = key(
        "true: KVSteer binds the zmq endpoint, one for each worker and rank; the worker connects",
        default=False,
    )
    ranks: int = key(
        "number of publishers inside this worker (data parallel); over ZMQ, rank r uses both"
        " ports + r",
        1,
        minimum=1,
        maximum=MAX_RANKS,
    )
    load: str | None = key(
        "the ZMQ endpoint of rank 0 on which SGLang publishes its load (--load-publish-endpoint),"
        " tcp://host:port; rank r uses the port + r",
        None,
    )
    grpc: str | None = key(
        "host:port of a gRPC server with SubscribeKvEvents: an engine's own, or `kvsteer bridge`",
        None,
    )
    service: str = key("whose gRPC service that is", "vllm", choices=SERVICES)
    drain: str | None = key(
        "http://host:port of a TensorRT-LLM server, whose events are drained by POST"
        " /kv_cache_events; only one client may drain them",
        None,
    )


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """The engine that a worker runs, and its release."""

    name: str = key("the engine", choices=ENGINES)
    version: str = key('its release, in quotes, such as "0.32.0"')

    @property
    def engine(self) -> Engine | None:
        """The engine; None if its version names no release, which is a fault of the file."""
        release = release_of(self.version)
        return None if release is None else Engine(self.name, release)


_ENGINE = (
    "the engine and its release, which decide how requests become prompts; by default the {}"
    " asked for them (/v1/models, /version, /server_info)"
)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One engine server."""

    endpoint: str = key("host:port that Envoy sends requests to; IPv6 in brackets")
    model: str | None = key("the model it serves; optional if only one model is configured", None)
    block_size: int | None = key(
        "tokens per cache block, used until its events report it",
        None,
        minimum=1,
    )
    events: WorkerEvents | Literal["auto"] | None = key(
        "its event feed; without one, it is routed by load and by the prompts sent there; auto"
        " asks the worker for it (/kv_event_sources of vLLM, /server_info of SGLang)",
        None,
    )
    lora: tuple[str, ...] | None = key(
        "the adapters that it serves, [] for none; by default all adapters of its model, or with"
        " learn: true those that the worker lists",
        None,
    )
    learn: bool = key(
        "true: KVSteer asks the worker for its model, adapters and block size if they are not"
        " given here (/v1/models, /server_info)",
        default=False,
    )
    engine: WorkerEngine | None = key(_ENGINE.format("worker is"), None)
    draining: bool = key("true: the worker gets no new requests", default=False)
    role: str = key(
        "which part of a request it takes: prefill computes prompts for other workers, decode"
        " answers, both takes whole requests",
        "both",
        choices=ROLES,
    )
    transfer_port: int | None = key(
        "the port on which a prefill worker transfers the KV blocks it computed, instead of"
        " disaggregation.transfer_port",
        None,
        minimum=1,
        maximum=65_535,
    )


@dataclass(frozen=True, slots=True)
class EventPorts:
    """Where a discovered worker publishes its events, on its own address."""

    zmq_port: int | None = key("the ZMQ PUB port of rank 0", None, minimum=1)
    replay_port: int | None = key("the ZMQ replay port of rank 0", None, minimum=1)
    topic: str = key("the topic prefix to subscribe to; empty subscribes to every topic", "")
    ranks: int = key(
        "number of publishers inside each worker (data parallel); rank r uses both ports + r",
        1,
        minimum=1,
        maximum=MAX_RANKS,
    )
    load_port: int | None = key(
        "the ZMQ port of rank 0 on which SGLang publishes its load", None, minimum=1
    )
    grpc_port: int | None = key(
        "the port of a gRPC server with SubscribeKvEvents, instead of zmq_port", None, minimum=1
    )
    service: str = key("whose gRPC service that is", "vllm", choices=SERVICES)
    drain: bool = key(
        "true: events are drained by POST /kv_cache_events on the worker's HTTP port, instead of"
        " zmq_port",
        default=False,
    )


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """Settings shared by all workers of one discovery source."""

    port: int = key("the port that Envoy sends requests to", 8000, minimum=1)
    model: str | None = key(
        "the model they serve; by default the only configured one, or the one that the worker"
        " lists",
        None,
    )
    block_size: int | None = key(
        "tokens per cache block, used until its events report it",
        None,
        minimum=1,
    )
    lora: tuple[str, ...] | None = key(
        "the adapters they serve, [] for none; by default those that the worker lists", None
    )
    role: str = key(
        "which part of a request they take: prefill, decode or both", "both", choices=ROLES
    )
    learn: bool = key(
        "true: KVSteer asks the workers for model, adapters and block size if they are not given"
        " here (/v1/models, /server_info)",
        default=True,
    )
    engine: WorkerEngine | None = key(_ENGINE.format("workers are"), None)
    events: EventPorts | Literal["auto"] | None = key(
        "their event feeds; without them, they are routed by load and by the prompts sent there;"
        " auto asks each worker for its own (/kv_event_sources of vLLM, /server_info of SGLang)",
        None,
    )


@dataclass(frozen=True, slots=True)
class DnsName:
    """A DNS name whose addresses are workers."""

    name: str = key("the name to look up; the hosts file is not read")
    srv: bool = key("true: look up SRV records, which also give the ports", default=False)
    interval_ms: int = key(
        "longest time between two lookups, in milliseconds; a shorter DNS time to live is honoured,"
        " but not below 1 s",
        5_000,
        minimum=1_000,
    )
    nameserver: str | None = key(
        "the ip:port of the name server to ask; by default the system's", None
    )
    worker: FoundWorker = key("settings of every worker that the name leads to", FoundWorker)


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Pods that are workers."""

    namespace: str | None = key("the namespace of the pods; by default KVSteer's own", None)
    selector: str | None = key("the label selector of the pods, such as app=vllm", None)
    inference_pool: str | None = key(
        "the name of an InferencePool, whose selector and targetPorts are used instead",
        None,
    )
    kubeconfig: str | None = key(
        "a kubeconfig file for the API server; by default the service account of KVSteer's own pod",
        None,
    )
    deletion_cost: bool = key(
        "true: every five minutes the pods get the annotation"
        " controller.kubernetes.io/pod-deletion-cost; needs permission to patch pods",
        default=False,
    )
    worker: FoundWorker = key(
        "settings of every pod, unless its labels and annotations say otherwise", FoundWorker
    )


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """Sources of workers besides `workers`, followed while the router runs."""

    file: str | None = key(
        "a YAML file with a list of workers, in the form of `workers`; read again whenever it"
        " changes",
        None,
    )
    dns: tuple[DnsName, ...] = key("names whose addresses are workers", ())
    kubernetes: Kubernetes | None = key("pods that are workers", None)


@dataclass(frozen=True, slots=True)
class Envoy:
    """Settings for `kvsteer envoy`; the router compares its own limits with Envoy's."""

    listen: str = key("address Envoy serves clients on, ip:port", "127.0.0.1:10000")
    admin: str = key("address of Envoy's own admin server, ip:port", "127.0.0.1:9901")
    router: str | None = key(
        "address at which Envoy reaches the router, host:port or unix:PATH; by default"
        " extproc.listen",
        None,
    )
    routers: Routers | None = key("several routers, instead of envoy.router", None)
    router_tls: RouterTls | None = key("TLS to the router; by default plain text", None)
    message_timeout_ms: int = key(
        "milliseconds Envoy waits for each answer of the router before it goes on without it",
        500,
        minimum=1,
    )
    request_body_buffer_limit_bytes: int = key(
        "largest request body, in bytes, that Envoy can hold for the router and for retries",
        32 * 1024 * 1024,
        minimum=1024,
    )
    eds_directory: str | None = key(
        "a directory shared with Envoy, in which the router writes the workers' addresses; by"
        " default Envoy knows only the workers of this file",
        None,
    )


DIALECTS = ("auto", "buffered", "epp")
SERVERS = ("lean", "grpcio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The gRPC server's certificate, and the authorities of its clients; PEM files.

    The files are checked once a second: new ones are used for new connections.
    """

    certificate: str = key("a PEM file with the certificate, followed by its chain up to the root")
    client_ca: str | None = key(
        "a PEM file with certificate authorities: only clients with a certificate from one of"
        " them may connect; by default any client may",
        None,
    )
    # last, since it hides the function of the same name
    key: str = key("a PEM file with the certificate's private key, without a password")


@dataclass(frozen=True, slots=True)
class ExtProc:
    """The gRPC server that Envoy talks to."""

    listen: str = key("address of the gRPC server, host:port or unix:PATH", "127.0.0.1:9002")
    server: str = key(
        "gRPC server to use: lean is KVSteer's own; grpcio is the reference and uses many times"
        " its CPU",
        "lean",
        choices=SERVERS,
    )
    dialect: str = key(
        "protocol that proxies may speak: auto uses what each proxy declares, else BUFFERED"
        " bodies; buffered refuses the Endpoint Picker Protocol (FULL_DUPLEX_STREAMED); epp uses"
        " that if a proxy declares nothing",
        "auto",
        choices=DIALECTS,
    )
    deadline_ms: int = key(
        "time limit of a decision, in milliseconds; a request that takes longer is routed without"
        " its tokens; must be below envoy.message_timeout_ms",
        250,
        minimum=1,
    )
    max_body_bytes: int = key(
        "largest request body that is read, in bytes; a larger one is routed by load as soon as"
        " its headers arrive; prompts in bodies over 4 MiB are routed without their tokens",
        32 * 1024 * 1024,
        minimum=1024,
    )
    tls: Tls | None = key("TLS, if listen is host:port; by default plain text", None)
    socket_mode: str = key(
        "permissions of the socket if listen is unix:PATH, as a chmod mode in quotes",
        "0660",
    )
    processes: int = key(
        "number of router processes, of which one follows the feeds for all; process n adds 10 n to"
        " the ports of extproc, admin and metrics, and listens on PATH.n instead of unix:PATH",
        1,
        minimum=1,
        maximum=64,
    )
    drain_ms: int = key(
        "milliseconds that open streams have to finish when the router is stopped (draining)",
        5_000,
    )
    leave_ms: int = key(
        "milliseconds before draining in which a stopping router says that it is not ready but"
        " still accepts new streams",
        0,
    )


@dataclass(frozen=True, slots=True)
class Admin:
    """The operator's HTTP server: /workers, /explain, /events."""

    listen: str = key(
        "address of the admin server, host:port; keep it on loopback", "127.0.0.1:9090"
    )
    hosts: tuple[str, ...] = key(
        "names under which browsers and clients reach the admin server, without ports; its own"
        " address and loopback need not be named",
        (),
    )


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The HTTP server for scrapers: /metrics, /healthz, /readyz."""

    listen: str = key("address of the metrics server, host:port", "127.0.0.1:9091")


@dataclass(frozen=True, slots=True)
class Events:
    """Whether the workers' events are used at all."""

    enabled: bool = key(
        "false routes as if no worker had events; can be changed at run time by SIGHUP or"
        " POST /events",
        default=True,
    )
    ready_deadline_ms: int = key(
        "milliseconds after which the router reports ready even if it does not yet know"
        " everything that the workers hold; unknown blocks earn no credit",
        10_000,
    )
    auto_hosts: tuple[str, ...] = key(
        "hosts, besides its own, that a worker with `events: auto` may report as the host of its"
        " publisher",
        (),
    )
    auto_ranks: int = key(
        "most ranks that a worker with `events: auto` may report; each takes a connection and"
        " memory",
        MAX_NAMED_RANKS,
        minimum=1,
        maximum=MAX_RANKS,
    )


POLICIES = ("cost", "cache_aware", "prefix_cache", "least_request", "round_robin", "random")


@dataclass(frozen=True, slots=True)
class Cost:
    """The weights of policy `cost`."""

    affinity_percent: int = key(
        "weight of an uncached prompt token on an idle fleet, in percent of a token that is"
        " queued ahead of the request",
        100,
    )
    busy_affinity_percent: int = key(
        "percentage points added to that weight on a fleet that is half busy or more, and for"
        " each second, up to ten, that the shortest queue takes",
        100,
    )
    running_tokens: int = key("cost of each request in flight on a worker, in tokens", 128)
    uncertain_percent: int = key(
        "credit for a token in an uncertain block, in percent of a certain one", 50
    )
    speculative_percent: int = key(
        "credit for a token of a request in flight on that worker, in percent of a certain one",
        90,
    )
    siblings_percent: int = key(
        "credit for a token that is queued on a worker for another request and that this request"
        " would wait for there, besides speculative_percent: so requests that begin with one long"
        " new prefix at the same time go to one worker, although each may wait longer by this part"
        " of it; 0 turns it off",
        0,
    )
    approximate_percent: int = key(
        "credit for a token that was sent to a worker without events, in percent of a certain one",
        90,
    )
    prefill_tokens_per_second: int = key(
        "uncached prompt tokens that a worker is assumed to compute in a second, until policy.learn"
        " knows better",
        8_000,
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """How a worker is picked."""

    name: str = key("the policy by which workers are picked", "cost", choices=POLICIES)
    header: str | None = key(
        "a request header that may name another policy; by default none is read", None
    )
    endpoints: int | None = key(
        "most endpoints that the proxy is given, best first. By default 3 in the buffered"
        " dialect, and 1 in the Endpoint Picker Protocol",
        None,
        minimum=1,
        maximum=8,
    )
    session_header: str | tuple[str, ...] | None = key(
        "what names a client's session, whose requests prefer the same worker while tokens are"
        " not known. auto: the headers x-claude-code-session-id, session-id, x-session-affinity"
        " and x-session-id, else the body's conversation, prompt_cache_key or metadata.user_id;"
        " none: nothing; or a header or a list of them, of which the first that a request has"
        " counts",
        AUTO,
    )
    rank_header: str | None = key(
        "a request header that KVSteer sets to the rank that holds most of the prompt, for"
        " workers whose ranks share one HTTP port. auto: as each worker's release reads it; null:"
        " no rank is named",
        "auto",
    )
    block_size: int = key(
        "tokens per cache block of a worker whose events and configuration do not give it",
        16,
        minimum=1,
    )
    cost: Cost = key("the weights of cost", Cost)
    cache_aware: CacheAware = key("the settings of cache_aware", CacheAware)
    prefix_cache: PrefixCacheSettings = key("the settings of prefix_cache", PrefixCacheSettings)
    sample: int | None = key(
        "how many random workers the policy cost compares, besides those that hold part of the"
        " prompt; 0 compares all. By default 32, and 12 among routers that share",
        None,
    )
    speculative_ms: int = key(
        "milliseconds for which the blocks of a request in flight are expected on its worker",
        60_000,
    )
    approximate_ms: int = key(
        "milliseconds for which a worker without events is expected to hold what was sent there",
        600_000,
    )
    sent_bytes: int = key(
        "memory for the record of prompts sent to workers, in bytes; a prompt of 8k tokens takes"
        " about 40 entries of 160 bytes each",
        64 * 1024 * 1024,
        minimum=1024,
    )
    learn: bool = key(
        "true: how fast each worker computes prompts is learned from its feed; false:"
        " policy.cost.prefill_tokens_per_second holds for all",
        default=True,
    )
    scrape_interval_ms: int = key(
        "milliseconds between two reads of each worker's /metrics; 0 turns them off: a single"
        " router's own count of requests is enough",
        0,
    )
    probe_interval_ms: int | None = key(
        "milliseconds between two probes (GET /health) of each worker; one that fails two in a"
        " row is ejected until it answers. By default a worker is probed only when in doubt; 0"
        " turns probes off",
        None,
    )
    max_in_flight: int | None = key(
        "most requests in flight on a worker: one with more is picked only if all workers have"
        " more",
        None,
        minimum=1,
    )
    classes: Classes | None = key("classes of requests, which go before each other", None)
    shed: bool = key("true: answer 429 if all workers are above max_in_flight", default=False)
    refuse: bool = key("true: answer 503 if no worker may take a request", default=False)


# When a model's tokens are compared with its workers'.
START, OFF = "start", "off"


@dataclass(frozen=True, slots=True)
class RemoteTokenizerSettings:
    """The model's workers as its tokenizer (POST /tokenize), instead of local files."""

    remote: bool = key(
        "true: the model's workers tokenize prompts (POST /tokenize)",
        default=True,
    )
    deadline_ms: int = key(
        "milliseconds to wait for an answer, within extproc.deadline_ms; then the request is"
        " routed without its tokens",
        200,
        minimum=1,
    )
    connections: int = key("most connections to each worker", 8, minimum=1)
    cache_bytes: int = key("memory for cached answers, in bytes; 0 caches none", 64 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as requests name it, and how its prompts become tokens."""

    name: str = key("the name that requests use")
    aliases: tuple[str, ...] = key("other names for the same model", ())
    lora: tuple[str, ...] = key("adapter names that requests may use as the model", ())
    tokenizer: str | RemoteTokenizerSettings | None = key(
        "a directory, a tokenizer.json, a hub id found in the local Hugging Face cache, or"
        " {remote: true}; without a tokenizer texts are compared, not tokens",
        None,
    )
    tokenizer_mode: str = key(
        "as the engine's --tokenizer-mode: mistral takes tekken.json or tokenizer.model.v*; hf"
        " takes the other files; auto decides by the files, as vLLM does",
        "auto",
        choices=("auto", "hf", "mistral"),
    )
    chat_template: str | None = key(
        "a Jinja file used instead of the model's own chat template", None
    )
    policy: str | None = key(
        "the policy for this model, instead of policy.name", None, choices=POLICIES
    )
    verify: str = key(
        "start: the router compares its tokens for golden requests with each worker's POST"
        " /tokenize, and routes approximately to a worker whose tokens differ; off: only live"
        " traffic is compared",
        "start",
        choices=(START, OFF),
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration as dataclasses: each section is one, each key a field made by `key`."""

    extproc: ExtProc = key("the gRPC server that Envoy talks to", ExtProc)
    admin: Admin = key("the operator's HTTP server", Admin)
    metrics: MetricsSettings = key("the HTTP server for scrapers", MetricsSettings)
    log: Log = key("what is logged", Log)
    log_prompts: bool = key("true puts prompt text into debug logs", default=False)
    events: Events = key("whether the workers' events are used", Events)
    models: tuple[Model, ...] = key("the models served, at least one", ())
    workers: tuple[WorkerSettings, ...] = key(
        "the engine servers; at least one, unless discovery finds them", ()
    )
    discovery: DiscoverySettings = key(
        "where workers are found that are not listed", DiscoverySettings
    )
    policy: Policy = key("how a worker is picked", Policy)
    steering: SteeringSettings = key("how many requests are steered", SteeringSettings)
    disaggregation: Disaggregation = key(
        "how a prompt may be computed by one worker and continued by another", Disaggregation
    )
    stores: tuple[StoreSettings, ...] = key("stores of KV blocks that workers share", ())
    sharing: SharingSettings | None = key("several routers that decide as one", None)
    isolation: Isolation | None = key("tenants whose caches are kept apart", None)
    accounting: Accounting = key("which parts of responses are read", Accounting)
    report: ReportSettings = key("what GET /report tells", ReportSettings)
    state: State = key("what the router knows after a restart", State)
    recorder: RecorderSettings = key(
        "a recording of what passes, without prompts", RecorderSettings
    )
    envoy: Envoy = key("what `kvsteer envoy` prints", Envoy)

    def model_of(self, worker: WorkerSettings) -> str:
        """Returns the name of the model that a worker serves."""
        return worker.model or self.models[0].name

    def router_addresses(self) -> tuple[str, ...]:
        """Returns the addresses at which Envoy reaches the routers."""
        several = self.envoy.routers
        return several.addresses if several else (self.envoy.router or self.extproc.listen,)
