"""The configuration as dataclasses: each section is one, each key a field made by `setting`.

This folder turns a file into one frozen object, or into a list of all that is wrong with it. What a
key means, its unit and its bounds stand at its field, here and in `sections`; docs/configuration.md
lists every key, and a test compares it with the fields. `reader` reads types and bounds,
`rules` and `fleet_rules` what only several keys together can break, and `feature_doubts` what is
allowed but does nothing. Sets that others look up stand here too: policies (`policies`), kinds of
feeds (`feed_kinds`), headers that the router owns (`owned_headers`).

It may know what files hold and what exists to be configured. It opens no socket and starts nothing.

The rule: a configuration is checked once, as a whole, before anything starts. What has passed is
never changed nor checked again, and whoever gets a section may rely on it.
Units are in the names: _ms milliseconds, _bytes bytes, _tokens tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from extproc.base.engine import ENGINES, FRONT_ENDS, PYTHON, Engine, release_of
from extproc.config.policies import POLICIES
from extproc.config.sections import (
    FALLBACKS,
    LEAST_REQUEST,
    ROLES,
    CacheAware,
    Classes,
    Disaggregation,
    HoldSettings,
    Isolation,
    Log,
    MissSettings,
    PrefixCacheSettings,
    ProbeSettings,
    RecorderSettings,
    ReportSettings,
    Routers,
    RouterTls,
    SharingSettings,
    State,
    SteeringSettings,
    StoreSettings,
    TokenHandover,
    setting,
)

# Each value includes the ones before it.
UNREAD, _, USAGE = RESPONSES = ("none", "headers", "usage")


@dataclass(frozen=True, slots=True)
class Accounting:
    """Which parts of responses are read: Envoy holds each until KVSteer lets it pass unchanged."""

    responses: str = setting(
        "what Envoy sends of responses: none; headers (status, first byte, server); usage "
        "(also cached tokens; a message a chunk)",
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

    zmq: str | None = setting("ZMQ PUB endpoint of rank 0, tcp://host:port", None)
    replay: str | None = setting(
        "ZMQ replay endpoint of rank 0; without it, missed events are lost",
        None,
    )
    topic: str = setting("topic prefix; empty subscribes to every topic", "")
    bind: bool = setting(
        "true: KVSteer binds the zmq endpoint, and the worker connects",
        default=False,
    )
    ranks: int = setting(
        "data-parallel publishers; over ZMQ, rank r uses ports + r",
        1,
        minimum=1,
        maximum=MAX_RANKS,
    )
    load: str | None = setting(
        "ZMQ endpoint of SGLang's load (--load-publish-endpoint), rank 0",
        None,
    )
    grpc: str | None = setting(
        "host:port of an engine's gRPC server, or of `kvsteer bridge`",
        None,
    )
    service: str = setting("whose gRPC service that is", "vllm", choices=SERVICES)
    drain: str | None = setting(
        "http://host:port of a TensorRT-LLM server, drained by POST /kv_cache_events; "
        "only one client may",
        None,
    )


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """The engine that a worker runs, its release, and its front end."""

    name: str = setting("the engine", choices=ENGINES)
    version: str = setting('its release, in quotes, such as "0.32.0"')
    frontend: str | None = setting(
        "what serves its HTTP; by default the worker is asked", None, choices=FRONT_ENDS
    )

    @property
    def engine(self) -> Engine | None:
        """The engine; None if its version names no release, which is a fault of the file."""
        release = release_of(self.version)
        if release is None:
            return None
        return Engine(self.name, release, self.frontend or PYTHON)


_ENGINE = "the engine and its release; by default the {} asked (/v1/models, /version, /server_info)"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One engine server."""

    endpoint: str = setting("host:port that Envoy sends requests to; IPv6 in brackets")
    model: str | None = setting("the model it serves; not needed if one is configured", None)
    block_size: int | None = setting(
        "tokens per cache block until its events report it",
        None,
        minimum=1,
    )
    events: WorkerEvents | Literal["auto"] | None = setting(
        "its event feed; auto asks the worker",
        None,
    )
    lora: tuple[str, ...] | None = setting(
        "its adapters, [] for none; by default all of its model",
        None,
    )
    learn: bool = setting(
        "true: the worker is asked for what is not given here",
        default=False,
    )
    engine: WorkerEngine | None = setting(_ENGINE.format("worker is"), None)
    draining: bool = setting("true: it gets no new requests", default=False)
    role: str = setting(
        "prefill: computes prompts for others; decode: answers; both: takes whole requests",
        "both",
        choices=ROLES,
    )
    transfer_port: int | None = setting(
        "overrides disaggregation.transfer_port for this worker",
        None,
        minimum=1,
        maximum=65_535,
    )


@dataclass(frozen=True, slots=True)
class EventPorts:
    """Where a discovered worker publishes its events, on its own address."""

    zmq_port: int | None = setting("ZMQ PUB port of rank 0", None, minimum=1)
    replay_port: int | None = setting("ZMQ replay port of rank 0", None, minimum=1)
    topic: str = setting("topic prefix; empty subscribes to every topic", "")
    ranks: int = setting(
        "data-parallel publishers in each; rank r uses ports + r",
        1,
        minimum=1,
        maximum=MAX_RANKS,
    )
    load_port: int | None = setting("ZMQ port of SGLang's load, rank 0", None, minimum=1)
    grpc_port: int | None = setting("port of a gRPC server with events", None, minimum=1)
    service: str = setting("whose gRPC service that is", "vllm", choices=SERVICES)
    drain: bool = setting(
        "true: drained by POST /kv_cache_events on the worker's HTTP port",
        default=False,
    )


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """Settings shared by all workers of one discovery source."""

    port: int = setting("the port that Envoy sends requests to", 8000, minimum=1)
    model: str | None = setting(
        "the model; by default the only one, or the one that the worker lists",
        None,
    )
    block_size: int | None = setting(
        "tokens per cache block until events report it",
        None,
        minimum=1,
    )
    lora: tuple[str, ...] | None = setting(
        "adapters, [] for none; by default those that the worker lists", None
    )
    role: str = setting("as `workers[].role`", "both", choices=ROLES)
    learn: bool = setting(
        "as `workers[].learn`",
        default=True,
    )
    engine: WorkerEngine | None = setting(_ENGINE.format("workers are"), None)
    events: EventPorts | Literal["auto"] | None = setting(
        "as `workers[].events`, with ports on each worker's own address",
        None,
    )


@dataclass(frozen=True, slots=True)
class DnsName:
    """A DNS name whose addresses are workers."""

    name: str = setting("the name to look up")
    srv: bool = setting("true: look up SRV records, which also give ports", default=False)
    interval_ms: int = setting(
        "longest time between lookups; a shorter DNS time to live counts, from 1 s",
        5_000,
        minimum=1_000,
    )
    nameserver: str | None = setting("ip:port of the name server; by default the system's", None)
    worker: FoundWorker = setting("settings of every worker that the name leads to", FoundWorker)


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Pods that are workers."""

    namespace: str | None = setting("the pods' namespace; by default KVSteer's own", None)
    selector: str | None = setting("the pods' label selector, such as app=vllm", None)
    inference_pool: str | None = setting(
        "an InferencePool, whose selector and ports are used instead",
        None,
    )
    kubeconfig: str | None = setting(
        "a kubeconfig file; by default the pod's service account",
        None,
    )
    deletion_cost: bool = setting(
        "true: pods get the annotation pod-deletion-cost; needs permission to patch pods",
        default=False,
    )
    worker: FoundWorker = setting(
        "settings of every pod, unless its labels and annotations say otherwise", FoundWorker
    )


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """Sources of workers besides `workers`, followed while the router runs."""

    file: str | None = setting(
        "a watched file with a list as `workers`",
        None,
    )
    dns: tuple[DnsName, ...] = setting("names whose addresses are workers", ())
    kubernetes: Kubernetes | None = setting("pods that are workers", None)


@dataclass(frozen=True, slots=True)
class Envoy:
    """Settings for `kvsteer envoy`; the router compares its own limits with Envoy's."""

    listen: str = setting("where Envoy serves clients, ip:port", "127.0.0.1:10000")
    admin: str = setting("Envoy's own admin server, ip:port", "127.0.0.1:9901")
    router: str | None = setting(
        "where Envoy reaches the router; by default extproc.listen",
        None,
    )
    routers: Routers | None = setting("several routers, instead of envoy.router", None)
    router_tls: RouterTls | None = setting("TLS to the router; by default plain text", None)
    fallback: str = setting(
        "how Envoy balances requests without a pick: least_request; ring_hash: a hash of the "
        "headers of policy.session_header, at random without them",
        LEAST_REQUEST,
        choices=FALLBACKS,
    )
    message_timeout_ms: int = setting(
        "how long Envoy waits for each answer of the router",
        500,
        minimum=1,
    )
    request_body_buffer_limit_bytes: int = setting(
        "largest request body that Envoy holds",
        32 * 1024 * 1024,
        minimum=1024,
    )
    trusted_hops: int = setting(
        "proxies before Envoy that append to x-forwarded-for",
        0,
        minimum=0,
        maximum=16,
    )
    eds_directory: str | None = setting(
        "a directory shared with Envoy, into which the router writes the workers' addresses",
        None,
    )


DIALECTS = ("auto", "buffered", "epp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The gRPC server's certificate, and the authorities of its clients; PEM files.

    The files are checked once a second: new ones are used for new connections.
    """

    certificate: str = setting("PEM file: the certificate, then its chain up to the root")
    client_ca: str | None = setting(
        "PEM file: authorities of clients that may connect; by default any",
        None,
    )
    key: str = setting("PEM file: the private key, without a password")


@dataclass(frozen=True, slots=True)
class ExtProc:
    """The gRPC server that Envoy talks to."""

    listen: str = setting("the gRPC server, host:port or unix:PATH", "127.0.0.1:9002")
    dialect: str = setting(
        "auto: what each proxy declares, else buffered; buffered: refuses the Endpoint "
        "Picker Protocol; epp: assumes it if a proxy declares nothing",
        "auto",
        choices=DIALECTS,
    )
    deadline_ms: int = setting(
        "time limit of a decision; later tokens are not used; below envoy.message_timeout_ms",
        250,
        minimum=1,
    )
    max_body_bytes: int = setting(
        "largest body that is read; above 4 MiB tokens are not computed",
        32 * 1024 * 1024,
        minimum=1024,
    )
    path_prefixes: tuple[str, ...] = setting(
        "beginnings of paths that Envoy's routes take away, such as /llm/tiny; needed "
        "where bodies are edited, or for /generate",
        (),
    )
    tls: Tls | None = setting("TLS, if listen is host:port; by default plain text", None)
    socket_mode: str = setting(
        "permissions of a unix:PATH socket, in quotes",
        "0660",
    )
    processes: int = setting(
        "router processes; process n adds 10 n to its ports or listens on PATH.n, and uses FILE.n",
        1,
        minimum=1,
        maximum=64,
    )
    drain_ms: int = setting(
        "time for open streams to finish when the router stops",
        5_000,
    )
    leave_ms: int = setting(
        "time in which a stopping router is not ready but accepts streams",
        0,
    )


@dataclass(frozen=True, slots=True)
class Admin:
    """The operator's HTTP server: /workers, /explain, /events."""

    listen: str = setting("the admin server, host:port; keep it on loopback", "127.0.0.1:9090")
    hosts: tuple[str, ...] = setting(
        "further names under which the admin server is reached, without ports",
        (),
    )


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The HTTP server for scrapers: /metrics, /healthz, /readyz."""

    listen: str = setting("the metrics server, host:port", "127.0.0.1:9091")


@dataclass(frozen=True, slots=True)
class Events:
    """Whether the workers' events are used at all."""

    enabled: bool = setting(
        "false: as if no worker had events; changed by SIGHUP or POST /events",
        default=True,
    )
    ready_deadline_ms: int = setting(
        "latest time at which the router is ready",
        10_000,
    )
    auto_hosts: tuple[str, ...] = setting(
        "hosts that a worker with `events: auto` may name, besides its own",
        (),
    )
    auto_ranks: int = setting(
        "most ranks that such a worker may name",
        MAX_NAMED_RANKS,
        minimum=1,
        maximum=MAX_RANKS,
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """The weights of policy `cost`."""

    affinity_percent: int = setting(
        "weight of an uncached prompt token against a queued one, on an idle fleet",
        100,
    )
    busy_affinity_percent: int = setting(
        "added to it on a fleet half busy or more, and for each second, up to ten, of the "
        "shortest queue",
        100,
    )
    running_tokens: int = setting("cost of each request in flight on a worker", 128)
    uncertain_percent: int = setting("credit for a token in an uncertain block", 50)
    speculative_percent: int = setting(
        "credit for a token of a request in flight there",
        90,
    )
    siblings_percent: int = setting(
        "further credit for a token queued there for another request: keeps bursts with "
        "one new prefix together",
        0,
    )
    approximate_percent: int = setting(
        "credit for a token sent to a worker without events",
        90,
    )
    prefill_tokens_per_second: int = setting(
        "assumed speed of a worker until it is learned",
        8_000,
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """How a worker is picked."""

    name: str = setting("how workers are picked", "cost", choices=tuple(POLICIES))
    header: str | None = setting("a request header that may name another policy", None)
    endpoints: int | None = setting(
        "most endpoints that the proxy is given; by default 3, in the Endpoint Picker Protocol 1",
        None,
        minimum=1,
        maximum=8,
    )
    session_header: str | tuple[str, ...] | None = setting(
        "what names a session where tokens are not known: a header, a list, none, or "
        "auto: the headers x-claude-code-session-id, session-id, x-session-affinity, "
        "x-session-id, else the body's conversation, prompt_cache_key or metadata.user_id",
        AUTO,
    )
    rank_header: str | None = setting(
        "the header that names a rank behind one port; auto: as each worker's release "
        "reads it; null: none",
        "auto",
    )
    block_size: int = setting(
        "tokens per cache block where nothing else gives it",
        16,
        minimum=1,
    )
    cost: Cost = setting("the weights of cost", Cost)
    cache_aware: CacheAware = setting("the settings of cache_aware", CacheAware)
    prefix_cache: PrefixCacheSettings = setting("the settings of prefix_cache", PrefixCacheSettings)
    sample: int | None = setting(
        "random workers that cost compares; 0: all; by default 32, or 12 among routers that share",
        None,
    )
    speculative_ms: int = setting(
        "how long blocks of a request in flight are expected there",
        60_000,
    )
    approximate_ms: int = setting(
        "how long a worker without events is expected to hold prompts",
        600_000,
    )
    sent_bytes: int = setting(
        "memory for the record of sent prompts",
        64 * 1024 * 1024,
        minimum=1024,
    )
    learn: bool = setting(
        "true: each worker's speed is learned from its feed",
        default=True,
    )
    scrape_interval_ms: int = setting(
        "time between reads of each worker's /metrics; 0: never",
        0,
    )
    probe_interval_ms: int | None = setting(
        "time between GET /health of each worker; by default only in doubt; 0: never",
        None,
    )
    max_in_flight: int | None = setting(
        "most requests in flight on a worker, unless all have more",
        None,
        minimum=1,
    )
    classes: Classes | None = setting("classes of requests, which go before each other", None)
    hold: HoldSettings = setting("requests that wait until there is room", HoldSettings)
    hand_tokens: TokenHandover = setting("token ids that go with requests", TokenHandover)
    warm_models: tuple[str, ...] = setting(
        "models, at most 8, for each of which requests say in x-kvsteer-warm which share of the "
        "prompt is held; each costs a tokenization",
        (),
    )
    shed: bool = setting("true: answer 429 if all workers are above max_in_flight", default=False)
    refuse: bool = setting("true: answer 503 if no worker may take a request", default=False)


# When a model's tokens are compared with its workers'.
START, OFF = "start", "off"


@dataclass(frozen=True, slots=True)
class RemoteTokenizerSettings:
    """The model's workers as its tokenizer (POST /tokenize), instead of local files."""

    remote: bool = setting(
        "true: the model's workers tokenize (POST /tokenize)",
        default=True,
    )
    deadline_ms: int = setting(
        "how long an answer may take, within extproc.deadline_ms",
        200,
        minimum=1,
    )
    connections: int = setting("most connections to each worker", 8, minimum=1)
    cache_bytes: int = setting("memory for cached answers; 0: none", 64 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as requests name it, and how its prompts become tokens."""

    name: str = setting("the name that requests use")
    aliases: tuple[str, ...] = setting("other names for it", ())
    lora: tuple[str, ...] = setting("adapter names that requests may use as the model", ())
    tokenizer: str | RemoteTokenizerSettings | None = setting(
        "a directory, a tokenizer.json, a hub id in the local cache, or {remote: true}; "
        "without one, texts are compared",
        None,
    )
    tokenizer_mode: str = setting(
        "as the engine's --tokenizer-mode",
        "auto",
        choices=("auto", "hf", "mistral"),
    )
    chat_template: str | None = setting("a Jinja file instead of the model's chat template", None)
    chat_template_kwargs: Mapping[str, Any] | None = setting(
        "as the engine's --default-chat-template-kwargs",
        None,
    )
    policy: str | None = setting(
        "overrides policy.name for this model", None, choices=tuple(POLICIES)
    )
    verify: str = setting(
        "start: golden requests are compared with each worker's POST /tokenize; off: not",
        "start",
        choices=(START, OFF),
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration as dataclasses: each section is one, each key a field made by `setting`."""

    extproc: ExtProc = setting("the gRPC server that Envoy talks to", ExtProc)
    admin: Admin = setting("the operator's HTTP server", Admin)
    metrics: MetricsSettings = setting("the HTTP server for scrapers", MetricsSettings)
    probe: ProbeSettings | None = setting("the HTTP server for gateways that ask", None)
    log: Log = setting("what is logged", Log)
    log_prompts: bool = setting("true puts prompt text into debug logs", default=False)
    events: Events = setting("whether the workers' events are used", Events)
    models: tuple[Model, ...] = setting("the models served, at least one", ())
    workers: tuple[WorkerSettings, ...] = setting(
        "the engine servers; at least one, unless discovery finds them", ()
    )
    discovery: DiscoverySettings = setting(
        "where workers are found that are not listed", DiscoverySettings
    )
    policy: Policy = setting("how a worker is picked", Policy)
    steering: SteeringSettings = setting("how many requests are steered", SteeringSettings)
    disaggregation: Disaggregation = setting(
        "how a prompt may be computed by one worker and continued by another", Disaggregation
    )
    stores: tuple[StoreSettings, ...] = setting("stores of KV blocks that workers share", ())
    sharing: SharingSettings | None = setting("several routers that decide as one", None)
    isolation: Isolation | None = setting("tenants whose caches are kept apart", None)
    accounting: Accounting = setting("which parts of responses are read", Accounting)
    report: ReportSettings = setting("what GET /report tells", ReportSettings)
    misses: MissSettings = setting(
        "why prompts are computed again, and who breaks the cache", MissSettings
    )
    state: State = setting("what the router knows after a restart", State)
    recorder: RecorderSettings = setting(
        "a recording of what passes, without prompts", RecorderSettings
    )
    envoy: Envoy = setting("what `kvsteer envoy` prints", Envoy)

    def model_of(self, worker: WorkerSettings) -> str:
        """Returns the name of the model that a worker serves."""
        return worker.model or self.models[0].name

    @property
    def edits_bodies(self) -> bool:
        """Whether the router changes requests' bodies: salts, priorities, transfers."""
        parts = self.disaggregation
        takes_transfers = parts.mode is not None or parts.changes_bodies
        return takes_transfers or self.isolation is not None or self.policy.classes is not None

    def router_addresses(self) -> tuple[str, ...]:
        """Returns the addresses at which Envoy reaches the routers."""
        several = self.envoy.routers
        return several.addresses if several else (self.envoy.router or self.extproc.listen,)
