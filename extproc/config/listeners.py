"""Where the router listens, and what it says there."""

from dataclasses import dataclass

from extproc.config.key import key
from extproc.config.workers import MAX_NAMED_RANKS, MAX_RANKS

DIALECTS = ("auto", "buffered", "epp")
SERVERS = ("lean", "grpcio")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """What the gRPC server proves who it is with, and whom it lets in; PEM files.

    They are looked at once a second: new ones are used for new connections.
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
