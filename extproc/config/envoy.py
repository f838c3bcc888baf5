"""What is said of the Envoy in front."""

from dataclasses import dataclass

from extproc.config.key import key


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
