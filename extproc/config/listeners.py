"""Where the router listens, and what it says there."""

from dataclasses import dataclass

from extproc.config.key import key

DIALECTS = ("auto", "buffered")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


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
