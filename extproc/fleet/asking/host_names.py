"""Looks up host names."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable

# Returns the IP addresses of a host name. Raises OSError if it has none now, ValueError if it is
# no host name.
LookUp = Callable[[str], Awaitable[Iterable[str]]]


async def addresses_of(host: str) -> Iterable[str]:
    """Looks a host name up as the operating system does."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]
