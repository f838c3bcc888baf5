"""Rules for addresses that are listened on, by the router and by the Envoy in front."""

import ipaddress
import re
from collections.abc import Iterator

from extproc import address
from extproc.address import Address
from extproc.config.envoy import Envoy
from extproc.config.fleet_rules import address_fault
from extproc.config.shared_sources import same_place
from extproc.config.whole import Config

_MODE = re.compile("0?[0-7]{3}")

# sun_path of unix(7) has 108 bytes, the last of which is 0.
_MAX_PATH_BYTES = 107

_WILDCARDS = {4: "0.0.0.0", 6: "::"}  # noqa: S104 - compared with, not bound


def listener_faults(config: Config) -> Iterator[str]:
    """What is wrong with where the router and Envoy listen."""
    yield from _socket_or_address("extproc.listen", config.extproc.listen)
    yield from address_fault("admin.listen", config.admin.listen, address.parse)
    yield from address_fault("metrics.listen", config.metrics.listen, address.parse)
    yield from address_fault("envoy.listen", config.envoy.listen, _parse_ip)
    yield from address_fault("envoy.admin", config.envoy.admin, _parse_ip)
    if config.envoy.router is not None:
        yield from _socket_or_address("envoy.router", config.envoy.router)
    if not _MODE.fullmatch(config.extproc.socket_mode):
        yield f'extproc.socket_mode: must be as "0660", is {config.extproc.socket_mode!r}'
    yield from _tls(config)
    yield from _taken_twice(config)


def _socket_or_address(key: str, text: str) -> Iterator[str]:
    if text.startswith("/"):
        yield f"{key}: must be host:port or unix:PATH, is {text!r}; did you mean unix:{text}?"
        return
    if not text.startswith(address.UNIX_PREFIX):
        yield from address_fault(key, text, address.parse)
        return
    # gRPC also writes unix:///absolute/path.
    path = text.removeprefix(address.UNIX_PREFIX).removeprefix("//")
    size = len(path.encode())
    if not path:
        yield f"{key}: unix: needs a path"
    elif size > _MAX_PATH_BYTES:
        yield f"{key}: a socket's path has {_MAX_PATH_BYTES} bytes at the most, this one {size}"


def _parse_ip(text: str) -> None:
    place = address.parse(text)
    if not place.is_ip and place.host != "localhost":
        raise ValueError(f"must be an IP address and a port: Envoy listens on no name: {text!r}")


def _tls(config: Config) -> Iterator[str]:
    ours, theirs = config.extproc.tls, config.envoy.router_tls
    if ours is not None and config.extproc.listen.startswith(address.UNIX_PREFIX):
        yield "extproc.tls: is for host:port; extproc.socket_mode says who may use a Unix socket"
    if theirs is None:
        return
    if (theirs.certificate is None) != (theirs.key is None):
        yield "envoy.router_tls: certificate and key belong together"
    elif theirs.certificate is None and ours is not None and ours.client_ca is not None:
        yield "envoy.router_tls: needs certificate and key: extproc.tls.client_ca asks for them"


def _taken_twice(config: Config) -> Iterator[str]:
    """Addresses of which the system gives only one away.

    Envoy's are held against the router's only where both are known to be on one host, and where
    they are not those that nobody wrote: Envoy may have another configuration than ours.
    """
    envoy, plain = config.envoy, Envoy()
    ours = [
        ("extproc.listen", config.extproc.listen),
        ("admin.listen", config.admin.listen),
        ("metrics.listen", config.metrics.listen),
    ]
    theirs = [("envoy.listen", envoy.listen), ("envoy.admin", envoy.admin)]
    written = [
        one
        for one, usual in zip(theirs, (plain.listen, plain.admin), strict=True)
        if one[1] != usual
    ]
    faults = [*_clashes(ours), *_clashes(theirs)]
    if _is_loopback(envoy.router or config.extproc.listen):
        faults += _clashes([*ours, *written])
    yield from dict.fromkeys(faults)


def _clashes(listeners: list[tuple[str, str]]) -> Iterator[str]:
    for position, (key, text) in enumerate(listeners):
        for before, other in listeners[:position]:
            if _is_same(text, other):
                yield f"{key}: {text} is taken: {before} is {other}"
                break


def _is_same(one: str, other: str) -> bool:
    try:
        first, second = (same_place(address.parse(text)) for text in (one, other))
    except ValueError:  # told as what it is
        return False
    if first.port != second.port or not first.port:
        return False
    return first.host == second.host or _takes_in(first, second) or _takes_in(second, first)


def _takes_in(one: Address, other: Address) -> bool:
    """Whether the first is bound to all addresses of the second's kind."""
    return other.is_ip and one.host == _WILDCARDS[ipaddress.ip_address(other.host).version]


def _is_loopback(text: str) -> bool:
    try:
        host = same_place(address.parse(text)).host
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
