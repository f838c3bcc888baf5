"""Declares configuration keys, and the sections that depend on no other section."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from typing import Any

# Larger numbers are typing errors; timers and counters can hold these.
MAX_NUMBER = 2**31 - 1
MAX_MS = 366 * 24 * 3600 * 1000
MAX_BYTES = 2**40


def setting(
    doc: str,
    default: Any = MISSING,
    *,
    choices: tuple[str, ...] = (),
    minimum: int = 0,
    maximum: int | None = None,
) -> Any:
    """Declares a configuration key: its meaning and unit, its default, and the allowed values.

    maximum: the largest value, if it is not `largest_number` of the key's name.
    """
    metadata = {"doc": doc, "choices": choices, "minimum": minimum, "maximum": maximum}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def largest_number(name: str) -> int:
    """Returns the largest number that a key of this name accepts."""
    if name.endswith("_ms"):
        return MAX_MS
    return MAX_BYTES if name.endswith("_bytes") else MAX_NUMBER


LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class Log:
    """What is logged to standard error."""

    level: str = setting("lowest severity logged", "info", choices=LOG_LEVELS)
    format: str = setting("lines of text or JSON", "text", choices=LOG_FORMATS)
    decisions_percent: int = setting(
        "percentage of decisions logged with their costs",
        0,
        maximum=100,
    )


# A worker with role both takes whole requests; each other role takes one part of a request.
PREFILL, DECODE, BOTH = ROLES = ("prefill", "decode", "both")

HEADER, MIRROR = MODES = ("header", "mirror")
NIXL, OFFLOADING, MOONCAKE, SGLANG = CONNECTORS = ("nixl", "offloading", "mooncake", "sglang")


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """How a prompt may be computed by one worker and continued by another."""

    mode: str | None = setting(
        "who sends the second request: header: a sidecar beside the decode worker; mirror: Envoy",
        None,
        choices=MODES,
    )
    connector: str = setting(
        "the engines' connector; nixl with header only",
        NIXL,
        choices=CONNECTORS,
    )
    min_uncached_tokens: int = setting(
        "uncached tokens from which a prefill worker is used",
        128,
    )
    transfer_tokens_per_second: int = setting(
        "assumed speed of KV transfers",
        100_000,
        minimum=1,
    )
    interference_percent: int = setting(
        "weight of the delay that a prompt causes each request on a decode worker",
        50,
    )
    min_pulled_tokens: int | None = setting(
        "a picked worker pulls blocks from another that holds this many more tokens; by "
        "default never",
        None,
        minimum=1,
    )
    price_pulls: bool = setting(
        "true: the pick counts what workers could pull",
        default=False,
    )
    transfer_port: int = setting(
        "port of prefill workers' transfers (mirror only)",
        8_998,
        minimum=1,
        maximum=65_535,
    )

    @property
    def changes_bodies(self) -> bool:
        """Whether split requests need changes to their bodies, besides the choice of a worker."""
        pulls = self.min_pulled_tokens is not None
        return self.mode == MIRROR or (pulls and self.mode != HEADER)

    def prices_pulls(self, *, has_roles: bool) -> bool:
        """Whether what a worker could pull is a part of its cost, which then names the source.

        has_roles: whether any worker takes only a part of requests; then nothing is priced.
        """
        return self.min_pulled_tokens is not None and self.price_pulls and not has_roles

    @property
    def steers_all(self) -> bool:
        """Whether every request must be steered, because the proxy cannot choose two workers."""
        return self.mode is not None and not self.answers_alone(DECODE)

    def answers_alone(self, role: str) -> bool:
        """Returns whether a worker with this role can answer a request without another worker."""
        return role == BOTH or (role == DECODE and self.connector != SGLANG)


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """Several routers that decide as one: where they meet, and how they authenticate each other."""

    url: str = setting(
        "valkey://, valkeys:// (TLS), redis:// or rediss://host:port, unix:///path, directory:/path"
    )
    channel: str = setting("channel of Valkey or Redis, one for a fleet", "kvsteer")
    tick_ms: int = setting(
        "time between two messages of a router",
        10,
        minimum=1,
        maximum=1_000,
    )
    name: str | None = setting(
        "this router's name; by default host name and process id",
        None,
    )
    username: str | None = setting("user at Valkey or Redis (ACL)", None)
    password_file: str | None = setting("file with the password for Valkey or Redis", None)
    ca: str | None = setting(
        "PEM file with the server's authorities; by default the system's",
        None,
    )
    secret_file: str | None = setting(
        "file of 16 bytes or more, the same for all routers, that seals messages",
        None,
    )


# The percentage that steers all requests, and why some configurations require it.
ALL_PERCENT = 100.0
STEERS_ALL = "must be 100: SGLang's decode workers answer nothing that only the proxy sends them"


@dataclass(frozen=True, slots=True)
class SteeringSettings:
    """How many requests are steered; the others are decided and recorded, but left to the proxy."""

    percent: float = setting(
        "percentage of requests steered; changed by SIGHUP or POST /steering",
        ALL_PERCENT,
        maximum=100,
    )
    header: str | tuple[str, ...] | None = setting(
        "a header, a list, or auto (as policy.session_header): requests with the same "
        "value are all steered or none; by default the conversation's beginning decides",
        None,
    )

    def faults(self, disaggregation: Disaggregation) -> Iterator[str]:
        """Yields the fault of the percentage of steered requests, if there is one."""
        if disaggregation.steers_all and self.percent < ALL_PERCENT:
            yield f"steering.percent: {STEERS_ALL}"


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """The HTTP server for gateways that ask before they choose: POST /probe."""

    token_file: str = setting("file of 16 bytes or more: the token that callers must send")
    listen: str = setting("the probe server, host:port", "127.0.0.1:9092")
    max_concurrent: int = setting(
        "most probes at once; 429 beyond",
        4,
        minimum=1,
        maximum=64,
    )


# The most models whose fleets are asked about one request.
MAX_WARM_MODELS = 8


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """What GET /report returns: the results of requests, by time."""

    file: str | None = setting(
        "file that keeps the report across restarts",
        None,
    )


@dataclass(frozen=True, slots=True)
class State:
    """A file with what the router knows, so that it is not cold after a restart."""

    file: str | None = setting(
        "file with what the workers hold, for restarts: about 21 bytes a block",
        None,
    )
    interval_ms: int = setting(
        "time between two writes; also written at the stop",
        60_000,
        minimum=1_000,
        maximum=3_600_000,
    )


@dataclass(frozen=True, slots=True)
class ClassSettings:
    """A class of requests."""

    name: str = setting("its name in the header")
    priority: int = setting(
        "its number for the engines' queues, lower first",
        0,
    )
    max_in_flight: int | None = setting(
        "most requests of this class in flight on a worker; if all have as many, 429",
        None,
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class Classes:
    """Classes of requests, such as interactive and batch, in the order of the engines' queues."""

    header: str = setting(
        "the header that names the class; a filter before the router must set it and "
        "remove a client's own"
    )
    default: str = setting("the class of requests that name none or an unknown one")
    of: tuple[ClassSettings, ...] = setting("the classes, two at least")
    hits_first: bool = setting(
        "true: within a class, requests of which much is cached overtake others in the engines' "
        "queues",
        default=False,
    )


# How much longer than a hold's bound a proxy waits: a busy router is late.
HOLD_MARGIN_SECONDS = 10


@dataclass(frozen=True, slots=True)
class HoldSettings:
    """Requests that wait in the router while live contexts exceed the workers' caches.

    Those whose contexts would have to be computed anew wait, until there is room or the bound. How
    much live contexts may fill before is learned. Envoy must be configured to wait as long:
    `envoy_seconds`.
    """

    enabled: bool = setting(
        "true: while live contexts exceed the caches, those who begin or lost theirs wait",
        default=False,
    )
    classes: tuple[str, ...] = setting(
        "the classes whose requests may wait; all if none is named", ()
    )
    bound_seconds: int = setting(
        "longest wait of a request",
        120,
        minimum=1,
        maximum=600,
    )
    max_requests: int = setting(
        "most requests that wait in one router",
        512,
        minimum=1,
        maximum=100_000,
    )

    @property
    def envoy_seconds(self) -> int:
        """How long Envoy must let a request wait, and the most that the router may ask it for."""
        return self.bound_seconds + HOLD_MARGIN_SECONDS


@dataclass(frozen=True, slots=True)
class TokenHandover:
    """Token ids that go with requests, so that engines need not make them again.

    Only where they are proved to be the engine's. It needs `accounting.responses: usage`.
    """

    enabled: bool = setting(
        "true: engines get the token ids of long prompts, where these are proved",
        default=False,
    )
    min_tokens: int = setting(
        "shorter prompts go without",
        4_096,
        minimum=1,
    )
    sample_every: int = setting(
        "one of so many requests goes without, and what its engine counts is compared",
        64,
        minimum=2,
        maximum=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class MissSettings:
    """Why prompts are computed again, and who breaks the cache."""

    enabled: bool = setting(
        "true: for each turn of a conversation, it is found out why its tokens were computed",
        default=False,
    )
    memory_bytes: int = setting(
        "memory for the token ids of each conversation's last prompt, 4 bytes a token",
        256 * 1024 * 1024,
        minimum=1024 * 1024,
    )
    response_headers: bool = setting(
        "true: clients are told how much of their own last prompt was reused, and why not more",
        default=False,
    )
    worker_price_per_hour: float = setting(
        "what a worker costs in an hour, in any currency; 0: misses have no price",
        0.0,
    )


# What becomes of a request that names no tenant, and of all requests while the router is away.
REFUSE, COMMON = "refuse", "common"
OPEN, CLOSED = "open", "closed"


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A store of KV blocks that several workers mount: what one put there, each can load."""

    name: str = setting("its name in /explain, /workers and metrics")
    workers: tuple[str, ...] | None = setting(
        "endpoints that mount it; by default those whose events name blocks of locality REMOTE",
        None,
    )
    worth_percent: int = setting(
        "credit for a token in the store",
        50,
        maximum=100,
    )
    max_age_ms: int = setting(
        "how long a block counts after it was last stored",
        3_600_000,
        minimum=300_000,
    )
    media: tuple[str, ...] = setting(
        "media of its workers' events that lie in the store, such as [CPU]",
        (),
    )
    zmq: str | None = setting("where Mooncake's master publishes (kv_events_bind_endpoint)", None)


@dataclass(frozen=True, slots=True)
class Isolation:
    """Tenants whose caches are kept apart, by a salt in each request."""

    header: str = setting(
        "the header that names the tenant; a filter before the router must set it and "
        "remove a client's own"
    )
    secret_file: str = setting(
        "file of 16 bytes or more, the same for all routers, from which salts are made"
    )
    without_tenant: str = setting(
        "requests without the header: refuse: 403; common: one salt for all",
        REFUSE,
        choices=(REFUSE, COMMON),
    )
    share: tuple[str, ...] = setting("models whose caches all tenants share", ())
    fail: str = setting(
        "while the router is away, Envoy answers 5xx (closed), or sends requests on "
        "without a salt (open)",
        CLOSED,
        choices=(OPEN, CLOSED),
    )


@dataclass(frozen=True, slots=True)
class RecorderSettings:
    """A file in which requests are recorded, without their prompts."""

    file: str | None = setting(
        "file to which each request is written, without its prompt",
        None,
    )
    hours: int = setting(
        "hours that the recording covers at most",
        24,
        minimum=1,
        maximum=24 * 366,
    )
    bytes: int = setting(
        "most bytes of all its files",
        256 * 1024 * 1024,
        minimum=1024 * 1024,
        maximum=MAX_BYTES,
    )
    block_size: int = setting(
        "prompt tokens for each number written",
        64,
        minimum=1,
        maximum=65_536,
    )
    tenant_header: str | None = setting(
        "the header that names the tenant, if isolation.header does not",
        None,
    )


@dataclass(frozen=True, slots=True)
class CacheAware:
    """The settings of policy `cache_aware`, the same as SMG's."""

    cache_threshold_percent: int = setting(
        "share of the prompt from which a worker is preferred",
        30,
    )
    balance_abs_requests: int = setting(
        "load alone decides if the busiest has this many requests more",
        64,
    )
    balance_rel_percent: int = setting(
        "and this percentage of the idlest's",
        150,
    )


@dataclass(frozen=True, slots=True)
class PrefixCacheSettings:
    """The settings of policy `prefix_cache`, the same as AIBrix's."""

    imbalance_requests: int = setting(
        "load alone decides if the busiest has this many requests more",
        8,
    )
    sigma_percent: int = setting(
        "how far above the mean load a match may be, in standard deviations",
        100,
    )


# The headers by which clients name their sessions: Claude Code, Codex, opencode, and others.
SESSION_HEADERS = (
    "x-claude-code-session-id",
    "session-id",
    "x-session-affinity",
    "x-session-id",
)

# Words in place of a header's name: the known ones, or none.
KNOWN, NONE = "auto", "none"


def session_headers(named: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the headers that a key names, in lower case, in the order in which they count."""
    if named is None or named == NONE:
        return ()
    if named == KNOWN:
        return SESSION_HEADERS
    return tuple(map(str.lower, (named,) if isinstance(named, str) else named))


# How Envoy chooses the worker of a request that has no pick.
LEAST_REQUEST, RING_HASH = FALLBACKS = ("least_request", "ring_hash")

# How Envoy chooses one of several routers for a request.
ANY, STANDBY, CONVERSATION = ROUTER_CHOICES = ("any", "standby", "conversation")


@dataclass(frozen=True, slots=True)
class Routers:
    """Several routers, and how Envoy chooses among them."""

    addresses: tuple[str, ...] = setting(
        "where Envoy reaches the routers; a host name may resolve to several"
    )
    choice: str = setting(
        "any: each in turn; standby: the first that is ready; conversation: the same for "
        "the same conversation",
        ANY,
        choices=ROUTER_CHOICES,
    )
    conversation_headers: tuple[str, ...] = setting(
        "headers that name a conversation; the first counts",
        SESSION_HEADERS,
    )


@dataclass(frozen=True, slots=True)
class RouterTls:
    """How Envoy checks the router's certificate and presents its own; PEM files on Envoy's host."""

    ca: str = setting("PEM file: authorities of the router's certificate")
    name: str | None = setting(
        "DNS name that the router's certificate must have; by default any",
        None,
    )
    certificate: str | None = setting(
        "PEM file: Envoy's own certificate, for extproc.tls.client_ca", None
    )
    key: str | None = setting("PEM file: its private key", None)
