"""Asks workers where they publish their events, and what of their answers is taken.

A worker may name its own host only, or hosts that the operator lists: else it could have the router
connect to anything, and be credited with what another worker holds.
"""

import asyncio
import ipaddress
import socket
from typing import NamedTuple

import aiohttp

from extproc import address
from extproc.address import Address
from extproc.config.shared_sources import same_place
from extproc.workers.asking import Asking
from extproc.workers.feed_sources import PATHS, Place, discovered, places, strange_host
from kvstate.feeds.feed_sources import ZmqSource

RESOLVE_SECONDS = 2.0


class Told(NamedTuple):
    """A worker's sources, one a rank, and where these are, as no other worker may have them."""

    sources: tuple[ZmqSource, ...]
    places: frozenset[Place]


async def told(asking: Asking, endpoint: str, hosts: tuple[str, ...], max_ranks: int) -> Told | str:
    """What a worker tells of its feed, as far as it may; why nothing of it is taken, if so.

    hosts: that it may name besides its own.
    """
    answer = await sources(asking, endpoint)
    if isinstance(answer, str):
        return answer
    if len(answer) > max_ranks:
        return f"it names {len(answer)} ranks, more than events.auto_ranks ({max_ranks})"
    own = await _spellings(address.parse(endpoint).host)
    listed = frozenset(same_place(Address(host.lower(), 0)).host for host in hosts)
    strange = strange_host(answer, own | listed)
    if strange:
        return f"it publishes on {strange}, which is neither its own host nor in events.auto_hosts"
    return Told(answer, places(answer, own))


async def _spellings(host: str) -> frozenset[str]:
    """A host as it was named, and its addresses."""
    own = same_place(Address(host, 0)).host
    try:
        return frozenset((own, str(ipaddress.ip_address(own))))
    except ValueError:
        loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return frozenset((own,))
    return frozenset((own, *(str(place[0]) for *_, place in found)))


async def sources(asking: Asking, endpoint: str) -> tuple[ZmqSource, ...] | str:
    """A worker's sources, one a rank; why there are none in words, if so.

    endpoint: host:port of its HTTP server.
    """
    host = address.parse(endpoint).host
    reasons: list[str] = []
    for path in PATHS:
        try:
            answer = await asking.get(endpoint, path)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"it does not answer: {error or 'timeout'}"
        if isinstance(answer, str):
            reasons.append(f"{path}: {answer}")
            continue
        found = discovered(path, answer, host)
        if found:
            return found
        reasons.append(f"{path}: names no feed")
    return "; ".join(reasons)
