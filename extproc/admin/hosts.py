"""Which hosts a request to the admin server may name, so that DNS rebinding reaches nobody.

With DNS rebinding, a page of another site has its own name resolve to this server: the request then
names that site, which is not served. An address cannot be rebound.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from extproc.base.address import is_loopback


class AllowedHosts:
    """The hosts that are served: loopback, the configured ones, and the connection's own address.

    names: hosts without brackets and ports, in any case.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(map(_plain, names))

    def serves(self, authority: str, own: str | None) -> bool:
        """Returns whether a request for a host is served.

        authority: its Host header, with a port or without one. own: the address on which its
        connection came in; None if that is unknown.
        """
        named = host_in(authority)
        if not named:
            return False
        plain = _plain(named)
        return is_loopback(plain) or plain in self._names or (bool(own) and plain == _plain(own))


def host_in(authority: str) -> str:
    """Returns the host of host:port without brackets, in lower case; "" if there is none."""
    try:
        found = urlsplit(f"//{authority}")
        _ = found.port  # raises what a wrong one is
    except ValueError:
        return ""  # such as an unclosed bracket
    has_more = found.username is not None or found.path or found.query or found.fragment
    return "" if has_more else found.hostname or ""


def _plain(host: str | None) -> str:
    """Returns a host in the one form in which hosts are compared: an address without its zone."""
    text = (host or "").lower().strip("[]")
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text.removesuffix(".")
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
