"""Addresses as the configuration writes them: host:port, [IPv6]:port, unix:PATH."""

import ipaddress
from typing import NamedTuple

UNIX_PREFIX = "unix:"

# sun_path of unix(7) has 108 bytes, the last of which is 0.
MAX_PATH_BYTES = 107

# Every address of this host: a server can listen on it, but no client can connect to it.
WILDCARDS = ("*", "0.0.0.0", "::")
MAX_PORT = 65_535

_LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """A host (a name or an IP address, without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_ip(self) -> bool:
        """Whether the host is an IP address, not a name to be resolved."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


# Distance between the ports of a router's processes. Servers whose configured ports differ in the
# last digit, as the default ones do, do not collide.
PORT_STEP = 10


def nth(text: str, number: int) -> str:
    """Returns the address of one of several processes that share one configured address.

    The first process uses that address. Each further one uses a port that is higher by
    `PORT_STEP`, or .1, .2 and so on after the path of a Unix socket.

    Raises:
        ValueError: with what is wrong, in words.
    """
    if not number:
        return text
    if text.startswith(UNIX_PREFIX):
        return f"{text}.{number}"
    host, port = parse(text)
    port += PORT_STEP * number
    if port > MAX_PORT:
        raise ValueError(f"has no port for process {number}: {port} is above {MAX_PORT}")
    return str(Address(host, port))


def is_loopback(host: str) -> bool:
    """Tells whether a host, without brackets, is localhost or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse(text: str) -> Address:
    """Parses host:port, with IPv6 addresses in brackets.

    Raises:
        ValueError: with what is wrong, in words.
    """
    scheme, is_url, _ = text.partition("://")
    if is_url:
        raise ValueError(f"must be host:port, without {scheme}://, is {text!r}")
    host, separator, port = text.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise ValueError(f"must be host:port, is {text!r}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_ipv6(host):
            raise ValueError(f"has no IPv6 address in its brackets: {text!r}")
    elif _is_ipv6(host):
        raise ValueError(f"needs brackets around its IPv6 address: {text!r}")
    elif ":" in host:
        raise ValueError(f"must be host:port, is {text!r}")
    if not host or any(character.isspace() or character in "/@," for character in host):
        raise ValueError(f"must be host:port, is {text!r}")
    return Address(_canonical(host), int(port))


def _canonical(host: str) -> str:
    """Returns the canonical spelling of an IP address: Envoy compares addresses as text."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def parse_tcp(text: str) -> Address:
    """Parses a ZMQ endpoint tcp://host:port.

    Raises:
        ValueError: with what is wrong, in words.
    """
    if not text.startswith("tcp://"):
        raise ValueError(f"must be tcp://host:port, is {text!r}")
    return parse(text.removeprefix("tcp://"))


def parse_http(text: str) -> Address:
    """Parses a URL http://host:port, which may end in a slash.

    Raises:
        ValueError: with what is wrong, in words.
    """
    if not text.startswith("http://"):
        raise ValueError(f"must be http://host:port, is {text!r}")
    return parse(text.removeprefix("http://").removesuffix("/"))


def same_place(place: Address) -> Address:
    """Returns an address in the spelling used to compare addresses."""
    host = place.host.lower()
    return Address(_LOOPBACK if host == "localhost" else host, place.port)


def with_host(endpoint: str, name: str, host: str) -> str:
    """Returns an endpoint, with or without a scheme, with another host if it names this one.

    name: the host that it may name. host: the other one, without brackets.
    """
    scheme, separator, rest = endpoint.rpartition("://")
    try:
        place = parse(rest.removesuffix("/"))
    except ValueError:
        return endpoint
    if same_place(place).host != same_place(Address(name, 0)).host:
        return endpoint
    return f"{scheme}{separator}{place._replace(host=host)}"


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


# URL schemes of the server through which routers share, and whether each uses TLS.
ENGINE_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
ENGINE_PORT = 6379
DIRECTORY_PREFIX = "directory:"


class Rendezvous(NamedTuple):
    """Where routers that share meet: a Valkey server at an address or socket, or a directory."""

    engine: Address | None = None
    is_tls: bool = False
    socket: str = ""
    directory: str = ""

    def __str__(self) -> str:
        return str(self.engine or self.socket or self.directory)


def parse_rendezvous(text: str) -> Rendezvous:
    """Parses valkey://host:port and the like, unix:///path, or directory:/path.

    Raises:
        ValueError: with what is wrong, in words.
    """
    if text.startswith(DIRECTORY_PREFIX):
        return Rendezvous(directory=_absolute(text, text.removeprefix(DIRECTORY_PREFIX)))
    scheme, _, rest = text.partition("://")
    if scheme == "unix":
        return Rendezvous(socket=_absolute(text, rest))
    if scheme not in ENGINE_SCHEMES:
        raise ValueError(
            "must be valkey://host:port, valkeys://, redis://, rediss://, unix:///path, or"
            f" directory:/path, is {text!r}"
        )
    if "@" in rest:
        raise ValueError("must not hold a user or password: use username and password_file")
    place, _, database = rest.partition("/")
    if database not in ("", "0"):
        raise ValueError(f"names a database, but messages belong to none: {text!r}")
    has_port = place.rpartition(":")[2].isdigit() and not place.endswith("]")
    found = parse(place if has_port else f"{place}:{ENGINE_PORT}")
    return Rendezvous(found, ENGINE_SCHEMES[scheme])


def _absolute(text: str, path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"needs an absolute path, is {text!r}")
    return path
