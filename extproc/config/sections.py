"""How the configuration is declared, key by key, and its sections that know no other one."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from typing import Any

# Larger numbers are typing errors; timers and counters have room for these.
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


LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class Log:
    """What is logged, to standard error."""

    level: str = key("lowest severity that is logged", "info", choices=LOG_LEVELS)
    format: str = key("log records as lines of text or as JSON", "text", choices=LOG_FORMATS)
    decisions_percent: int = key(
        "percentage of decisions that are logged with all candidates and costs, as JSON",
        0,
        maximum=100,
    )


# A worker of role both takes whole requests; only the others take part of one.
PREFILL, DECODE, BOTH = ROLES = ("prefill", "decode", "both")

HEADER, MIRROR = MODES = ("header", "mirror")
NIXL, OFFLOADING, MOONCAKE, SGLANG = CONNECTORS = ("nixl", "offloading", "mooncake", "sglang")


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """How a prompt may be computed by one worker and continued by another."""

    mode: str | None = key(
        "who sends the second request: header, a sidecar beside the decode worker, which is told in"
        " x-prefiller-host-port; mirror, Envoy itself. By default every request has one worker",
        None,
        choices=MODES,
    )
    connector: str = key(
        "how the engines hand KV blocks over: nixl (vLLM's NixlConnector, header only), offloading"
        " (vLLM's OffloadingConnector with a p2p tier), mooncake (vLLM's MooncakeConnector) or"
        " sglang, whose decode workers cannot compute a prompt themselves",
        NIXL,
        choices=CONNECTORS,
    )
    min_uncached_tokens: int = key(
        "fewest tokens of a prompt for which a prefill worker is used, counted without those that"
        " the decode worker holds",
        128,
    )
    transfer_tokens_per_second: int = key(
        "tokens whose KV blocks are transferred from one worker to another in a second",
        100_000,
        minimum=1,
    )
    interference_percent: int = key(
        "weight of the delay that computing a prompt on a decode worker means for each request that"
        " it is answering, in percent of the same delay to the request itself",
        50,
    )
    min_pulled_tokens: int | None = key(
        "fewest tokens of a prompt that another worker has to hold beyond what the picked one does,"
        " so that it is named as the one to pull them from (vLLM's OffloadingConnector with a p2p"
        " tier, between workers whose transfer_port is set); by default none ever is",
        None,
        minimum=1,
    )
    transfer_port: int = key(
        "the port on which prefill workers hand over what they computed (mirror only): SGLang's"
        " --disaggregation-bootstrap-port, vLLM's VLLM_MOONCAKE_BOOTSTRAP_PORT, or the port of the"
        " p2p tier",
        8_998,
        minimum=1,
        maximum=65_535,
    )

    @property
    def changes_bodies(self) -> bool:
        """Whether requests say in their bodies what else they need than the worker they go to."""
        pulls = self.min_pulled_tokens is not None
        return self.mode == MIRROR or (pulls and self.mode != HEADER)

    @property
    def steers_all(self) -> bool:
        """Whether no request may be left to the proxy, which knows nothing of two workers."""
        return self.mode is not None and not self.answers_alone(DECODE)

    def answers_alone(self, role: str) -> bool:
        """Returns whether a worker of a role can answer a request without any other one."""
        return role == BOTH or (role == DECODE and self.connector != SGLANG)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Several routers that decide as one: where they meet, and by what they know each other."""

    url: str = key(
        "where the routers meet: an engine at valkey://host:port, redis://host:port, or with TLS"
        " valkeys:// or rediss://; its socket as unix:///path; for routers on one host without any"
        " engine directory:/path"
    )
    channel: str = key("the engine's channel; routers of one fleet use the same", "kvsteer")
    tick_ms: int = key(
        "milliseconds between two messages of a router in which something changed",
        10,
        minimum=1,
        maximum=1_000,
    )
    name: str | None = key(
        "this router's name for the others and on the page; by default its host's name and its"
        " process id",
        None,
    )
    username: str | None = key("the engine's user (ACL); by default its default user", None)
    password_file: str | None = key("a file with the engine's password", None)
    ca: str | None = key(
        "a PEM file: the engine's certificate must come from one of these authorities; by default"
        " one of the system's",
        None,
    )
    secret_file: str | None = key(
        "a file with a secret of 16 bytes or more, the same for all routers: it seals messages and"
        " keys fingerprints of prompts. By default the engine's password serves, and without one"
        " the channel's name, which is no secret",
        None,
    )


# How many of a hundred requests are steered where all are; and why it cannot be less.
ALL_PERCENT = 100.0
STEERS_ALL = "must be 100: SGLang's decode workers answer nothing that only the proxy sends them"


@dataclass(frozen=True, slots=True)
class Steering:
    """How many requests are steered; the others are decided, noted and left to the proxy."""

    percent: float = key(
        "how many of a hundred requests are steered, with decimals if need be; the others go where"
        " the proxy itself sends them. 0 observes only. Changed at run time by SIGHUP or POST"
        " /steering",
        ALL_PERCENT,
        maximum=100,
    )
    header: str | None = key(
        "a request header that says which requests belong together: all with the same value are"
        " steered, or none is. By default, and for requests without it, the beginning of the"
        " conversation says it",
        None,
    )

    def faults(self, disaggregation: Disaggregation) -> Iterator[str]:
        """Yields what is wrong with the share of requests that are steered."""
        if disaggregation.steers_all and self.percent < ALL_PERCENT:
            yield f"steering.percent: {STEERS_ALL}"


@dataclass(frozen=True, slots=True)
class Report:
    """What GET /report tells: what came of requests, by time."""

    file: str | None = key(
        "a file that keeps the report when the router is restarted: a few MiB at most, of numbers"
        " only, written anew each minute; process n of several has FILE.n. By default the report"
        " begins with the router",
        None,
    )


@dataclass(frozen=True, slots=True)
class Recorder:
    """A file in which it is recorded what passes, without prompts."""

    file: str | None = key(
        "a file to which each request is written, without its prompt, in the format of Mooncake's"
        " trace; by default none is",
        None,
    )
    hours: int = key(
        "hours that the recording reaches back at most; when half of them are over, the file"
        " becomes FILE.old",
        24,
        minimum=1,
        maximum=24 * 366,
    )
    bytes: int = key(
        "bytes that the file and FILE.old take at most together, each half of them",
        256 * 1024 * 1024,
        minimum=1024 * 1024,
        maximum=MAX_BYTES,
    )
    block_size: int = key(
        "tokens of a prompt for which one number is written: fewer show shared prefixes more"
        " exactly, and take more room; 512 is Mooncake's own",
        64,
        minimum=1,
        maximum=65_536,
    )


@dataclass(frozen=True, slots=True)
class CacheAware:
    """The settings of policy `cache_aware`, as SMG has them."""

    cache_threshold_percent: int = key(
        "smallest share of the prompt that a worker must hold to be preferred for it, in percent",
        30,
    )
    balance_abs_requests: int = key(
        "load alone decides if the busiest worker has this many requests more than the idlest", 64
    )
    balance_rel_percent: int = key(
        "and also this percentage of the idlest worker's requests: 150 is half as many again", 150
    )


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """The settings of policy `prefix_cache`, as AIBrix has them."""

    imbalance_requests: int = key(
        "load alone decides if the busiest worker has this many requests more than the idlest", 8
    )
    sigma_percent: int = key(
        "how far above the mean number of requests a worker with a match may be, in percent of the"
        " standard deviation",
        100,
    )


# Which of several routers a request goes to.
ANY, STANDBY, CONVERSATION = ROUTER_CHOICES = ("any", "standby", "conversation")


@dataclass(frozen=True, slots=True)
class Routers:
    """Several routers, as Envoy is to use them."""

    addresses: tuple[str, ...] = key(
        "under which Envoy reaches the routers, host:port or unix:PATH each; a host name may lead"
        " to several"
    )
    choice: str = key(
        "which router a request goes to: any, each in turn; standby, the first of addresses that is"
        " ready; conversation, always the same one for the same value of a conversation header",
        ANY,
        choices=ROUTER_CHOICES,
    )
    conversation_headers: tuple[str, ...] = key(
        "request headers that name a conversation, for choice conversation; of those that a request"
        " has the first counts, and a request without any goes to a random router",
        ("x-session-id", "x-session-affinity", "session-id", "x-claude-code-session-id"),
    )


@dataclass(frozen=True, slots=True)
class RouterTls:
    """How Envoy checks the router's certificate and shows its own; PEM files where Envoy runs."""

    ca: str = key("a PEM file: the router's certificate must come from one of these authorities")
    name: str | None = key(
        "the DNS name that the router's certificate must have, and that Envoy asks for (SNI); by"
        " default any",
        None,
    )
    certificate: str | None = key(
        "a PEM file: Envoy's own certificate, needed if extproc.tls.client_ca is set", None
    )
    # last, since it hides the function of that name
    key: str | None = key("a PEM file: the private key of Envoy's own certificate", None)
