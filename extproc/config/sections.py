"""Declares configuration keys, and the sections that depend on no other section."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from typing import Any

# Larger numbers are typing errors; timers and counters can hold these.
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
    """Declares a configuration key: its meaning and unit, its default, and the allowed values.

    maximum: the largest value, if it is not `most` of the key's name.
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


LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class Log:
    """What is logged to standard error."""

    level: str = key("lowest severity that is logged", "info", choices=LOG_LEVELS)
    format: str = key("log records as lines of text or as JSON", "text", choices=LOG_FORMATS)
    decisions_percent: int = key(
        "percentage of decisions that are logged with all candidates and costs, as JSON",
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

    mode: str | None = key(
        "who sends the second request: header, a sidecar beside the decode worker; mirror, Envoy"
        " itself. By default every request has one worker",
        None,
        choices=MODES,
    )
    connector: str = key(
        "how the engines transfer KV blocks: nixl (vLLM's NixlConnector, header only),"
        " offloading (vLLM's OffloadingConnector with a p2p tier), mooncake (vLLM's"
        " MooncakeConnector) or sglang",
        NIXL,
        choices=CONNECTORS,
    )
    min_uncached_tokens: int = key(
        "a prefill worker is used only if the decode worker lacks at least this many tokens of"
        " the prompt",
        128,
    )
    transfer_tokens_per_second: int = key(
        "speed at which KV blocks are transferred between workers, in tokens per second",
        100_000,
        minimum=1,
    )
    interference_percent: int = key(
        "weight of the delay that computing a prompt on a decode worker causes each request"
        " there, in percent",
        50,
    )
    min_pulled_tokens: int | None = key(
        "the picked worker pulls blocks from another worker only if that one holds at least this"
        " many more tokens of the prompt (vLLM's OffloadingConnector with a p2p tier, between"
        " workers whose transfer_port is set); by default it never does",
        None,
        minimum=1,
    )
    price_pulls: bool = key(
        "true: the pick considers what each worker could pull, and how long that would take;"
        " nothing is pulled where computing is faster; needs min_pulled_tokens",
        default=False,
    )
    transfer_port: int = key(
        "the port on which prefill workers transfer the KV blocks they computed (mirror only)",
        8_998,
        minimum=1,
        maximum=65_535,
    )

    @property
    def changes_bodies(self) -> bool:
        """Whether split requests need changes to their bodies, besides the choice of a worker."""
        pulls = self.min_pulled_tokens is not None
        return self.mode == MIRROR or (pulls and self.mode != HEADER)

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

    url: str = key(
        "where the routers exchange messages: valkey://host:port, redis://host:port, with TLS"
        " valkeys:// or rediss://, a socket as unix:///path; or, on one host, directory:/path"
    )
    channel: str = key(
        "the channel of Valkey or Redis; routers of one fleet use the same", "kvsteer"
    )
    tick_ms: int = key(
        "milliseconds between two messages of a router while something changes",
        10,
        minimum=1,
        maximum=1_000,
    )
    name: str | None = key(
        "this router's name, shown to the others and on the page; by default its host name and"
        " process id",
        None,
    )
    username: str | None = key(
        "the user at Valkey or Redis (ACL); by default its default user", None
    )
    password_file: str | None = key("a file with the password for Valkey or Redis", None)
    ca: str | None = key(
        "a PEM file with the certificate authorities of Valkey or Redis; by default the system's",
        None,
    )
    secret_file: str | None = key(
        "a file with a secret of 16 bytes or more, the same for all routers: it seals messages"
        " and keys fingerprints of prompts. By default the password or the channel's name",
        None,
    )


# The percentage that steers all requests, and why some configurations require it.
ALL_PERCENT = 100.0
STEERS_ALL = "must be 100: SGLang's decode workers answer nothing that only the proxy sends them"


@dataclass(frozen=True, slots=True)
class SteeringSettings:
    """How many requests are steered; the others are decided and recorded, but left to the proxy."""

    percent: float = key(
        "percentage of requests that are steered (decimals allowed); 0 only observes. Can be"
        " changed at run time by SIGHUP or POST /steering",
        ALL_PERCENT,
        maximum=100,
    )
    header: str | tuple[str, ...] | None = key(
        "a request header that groups requests, or a list: of those with the same value, either"
        " all are steered or none. auto: the headers of policy.session_header: auto. By default"
        " they are grouped by the beginning of the conversation",
        None,
    )

    def faults(self, disaggregation: Disaggregation) -> Iterator[str]:
        """Yields the fault of the percentage of steered requests, if there is one."""
        if disaggregation.steers_all and self.percent < ALL_PERCENT:
            yield f"steering.percent: {STEERS_ALL}"


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """What GET /report returns: the results of requests, by time."""

    file: str | None = key(
        "a file that keeps the report across restarts of the router, numbers only; with several"
        " processes, process n uses FILE.n",
        None,
    )


@dataclass(frozen=True, slots=True)
class State:
    """A file with what the router knows, so that it is not cold after a restart."""

    file: str | None = key(
        "a file with what the workers hold, how fast they are and what they run, with which the"
        " router starts again: about 21 bytes a block, no text or tokens of prompts; with several"
        " processes, process n uses FILE.n",
        None,
    )
    interval_ms: int = key(
        "milliseconds between two writes; it is also written when the router stops",
        60_000,
        minimum=1_000,
        maximum=3_600_000,
    )


@dataclass(frozen=True, slots=True)
class ClassSettings:
    """A class of requests."""

    name: str = key("its name, as the header writes it")
    priority: int = key(
        "its number for the engines' queues: of two classes, the lower number goes first; 0 is"
        " what engines assume of requests without one",
        0,
    )
    max_in_flight: int | None = key(
        "most requests of this class in flight on a worker; if all have as many, the answer is 429",
        None,
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class Classes:
    """Classes of requests, such as interactive and batch, in the order of the engines' queues."""

    header: str = key(
        "the request header that names the class: a filter before the router has to set it, and to"
        " remove a client's own"
    )
    default: str = key("the class of requests that name none, or one that is not known")
    of: tuple[ClassSettings, ...] = key("the classes, two at least")


# What becomes of a request that names no tenant, and of all requests while the router is away.
REFUSE, COMMON = "refuse", "common"
OPEN, CLOSED = "open", "closed"


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A store of KV blocks that several workers mount: what one put there, each can load."""

    name: str = key("the name of the store, in /explain, /workers and the metrics")
    workers: tuple[str, ...] | None = key(
        "the endpoints of the workers that mount it; by default those whose events name blocks of"
        " the locality REMOTE (vLLM's STORAGE tiers)",
        None,
    )
    worth_percent: int = key(
        "credit for a token in the store beyond what a worker holds itself, in percent of a token"
        " in its own cache",
        20,
        maximum=100,
    )
    max_age_ms: int = key(
        "milliseconds, and at most twice as long, for which a block counts after it was last"
        " stored, checked every five minutes: most stores never tell that a block is gone",
        3_600_000,
        minimum=300_000,
    )


@dataclass(frozen=True, slots=True)
class Isolation:
    """Tenants whose caches are kept apart, by a salt in each request."""

    header: str = key(
        "the request header that names the tenant: a filter before the router has to set it, and"
        " to remove a client's own"
    )
    secret_file: str = key(
        "a file with a secret of 16 bytes or more, the same for all routers, with which salts"
        " are made"
    )
    without_tenant: str = key(
        "a request without that header: refuse answers it with 403; common gives it the salt of"
        " all requests that name no tenant",
        REFUSE,
        choices=(REFUSE, COMMON),
    )
    share: tuple[str, ...] = key(
        "names of models whose caches all tenants share: their requests stay as they are", ()
    )
    fail: str = key(
        "what Envoy does while the router is away: open sends requests on without a salt; closed"
        " answers 5xx",
        OPEN,
        choices=(OPEN, CLOSED),
    )


@dataclass(frozen=True, slots=True)
class RecorderSettings:
    """A file in which requests are recorded, without their prompts."""

    file: str | None = key(
        "a file to which each request is written, without its prompt, in the format of Mooncake's"
        " trace; by default none is written",
        None,
    )
    hours: int = key(
        "hours that the recording covers at most; after half of them, FILE is renamed to FILE.old",
        24,
        minimum=1,
        maximum=24 * 366,
    )
    bytes: int = key(
        "most bytes that FILE and the older files take together; FILE may take half",
        256 * 1024 * 1024,
        minimum=1024 * 1024,
        maximum=MAX_BYTES,
    )
    block_size: int = key(
        "prompt tokens for each number written: fewer show shared prefixes more exactly but take"
        " more space; Mooncake uses 512",
        64,
        minimum=1,
        maximum=65_536,
    )
    tenant_header: str | None = key(
        "the request header that names the tenant, if isolation.header does not: lines then have a"
        " digest of it, for `kvsteer whatif --tenants`",
        None,
    )


@dataclass(frozen=True, slots=True)
class CacheAware:
    """The settings of policy `cache_aware`, the same as SMG's."""

    cache_threshold_percent: int = key(
        "smallest share of the prompt that a worker must hold to be preferred for it, in percent",
        30,
    )
    balance_abs_requests: int = key(
        "workers are picked by load alone if the busiest has over this many requests more than"
        " the idlest",
        64,
    )
    balance_rel_percent: int = key(
        "and also over this percentage of the idlest worker's requests: 150 means half as many"
        " again",
        150,
    )


@dataclass(frozen=True, slots=True)
class PrefixCacheSettings:
    """The settings of policy `prefix_cache`, the same as AIBrix's."""

    imbalance_requests: int = key(
        "workers are picked by load alone if the busiest has over this many requests more than"
        " the idlest",
        8,
    )
    sigma_percent: int = key(
        "how far above the mean number of requests a worker with a match may be, in percent of the"
        " standard deviation",
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


# How Envoy chooses one of several routers for a request.
ANY, STANDBY, CONVERSATION = ROUTER_CHOICES = ("any", "standby", "conversation")


@dataclass(frozen=True, slots=True)
class Routers:
    """Several routers, and how Envoy chooses among them."""

    addresses: tuple[str, ...] = key(
        "addresses at which Envoy reaches the routers, host:port or unix:PATH each; a host name"
        " may resolve to several"
    )
    choice: str = key(
        "which router a request goes to: any, each in turn; standby, the first that is ready;"
        " conversation, the same one for equal values of a conversation header",
        ANY,
        choices=ROUTER_CHOICES,
    )
    conversation_headers: tuple[str, ...] = key(
        "request headers that name a conversation, for choice conversation; the first that a"
        " request has counts",
        SESSION_HEADERS,
    )


@dataclass(frozen=True, slots=True)
class RouterTls:
    """How Envoy checks the router's certificate and presents its own; PEM files on Envoy's host."""

    ca: str = key(
        "a PEM file with certificate authorities: the router's certificate must come from one of"
        " them"
    )
    name: str | None = key(
        "the DNS name that the router's certificate must have, and that Envoy asks for (SNI); by"
        " default any",
        None,
    )
    certificate: str | None = key(
        "a PEM file with Envoy's own certificate, needed if extproc.tls.client_ca is set", None
    )
    # last, since it hides the function of that name
    key: str | None = key("a PEM file with the private key of Envoy's own certificate", None)
