"""Addresses as the configuration writes them: host:port, [IPv6]:port, unix:PATH."""

import ipaddress
from typing import NamedTuple

UNIX_PREFIX = "unix:"

# Every address of this host: to listen on, and nothing that could be connected to.
WILDCARDS = ("*", "0.0.0.0", "::")  # noqa: S104 - compared with, not bound
MAX_PORT = 65_535


class Address(NamedTuple):
    """A host (name or IP, without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_ip(self) -> bool:
        """Whether the host is an IP address rather than a name that has to be resolved."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


# By how much the ports of a router's processes differ, so that its three servers keep apart.
PORT_STEP = 10


def nth(text: str, number: int) -> str:
    """Returns the address of one of several processes that are configured with one address.

    The first has that address itself, the others a port that is higher by `PORT_STEP` each, or
    .1, .2 and so on behind the path of a Unix socket.

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
    """Splits host:port, IPv6 in brackets.

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
    """Returns an IP address in its one spelling: Envoy compares the addresses we name as text."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def parse_tcp(text: str) -> Address:
    """Splits a ZMQ endpoint tcp://host:port.

    Raises:
        ValueError: with what is wrong, in words.
    """
    if not text.startswith("tcp://"):
        raise ValueError(f"must be tcp://host:port, is {text!r}")
    return parse(text.removeprefix("tcp://"))


def parse_http(text: str) -> Address:
    """Splits a URL http://host:port, which may end in a slash.

    Raises:
        ValueError: with what is wrong, in words.
    """
    if not text.startswith("http://"):
        raise ValueError(f"must be http://host:port, is {text!r}")
    return parse(text.removeprefix("http://").removesuffix("/"))


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
