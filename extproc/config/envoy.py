"""What is said of the Envoy in front."""

from dataclasses import dataclass

from extproc.config.key import key


@dataclass(frozen=True, slots=True)
class RouterTls:
    """How Envoy checks the router, and proves who it is; PEM files where Envoy runs."""

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
