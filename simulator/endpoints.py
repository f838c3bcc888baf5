"""Where a worker listens: addresses of its API, and endpoints of its ranks' publishers."""

from collections.abc import Sequence

_MAX_PORT = 65535


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of a host:port (ValueError if it is none)."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) <= _MAX_PORT):
        raise ValueError(f"not a host:port: {address!r}")
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise ValueError(f"an IPv6 address needs brackets: {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of one rank: its port is the first's plus the rank; 0 stays any free port."""
    if not rank:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if int(port) else endpoint


def check_rank_endpoints(endpoints: Sequence[str], ranks: int) -> None:
    """ValueError unless every rank gets ports of its own on all endpoints."""
    if ranks == 1:
        return
    taken: set[int] = set()
    for endpoint in endpoints:
        scheme, _, address = endpoint.partition("://")
        if scheme != "tcp":
            raise ValueError(f"several ranks need a TCP endpoint, not {endpoint!r}")
        _, port = split_address(address)
        ports = set(range(port, port + ranks)) if port else set()
        if ports & taken or max(ports, default=0) > _MAX_PORT:
            raise ValueError(f"no room for {ranks} ranks from the port of {endpoint!r} on")
        taken |= ports
