"""Asks workers where they publish their events."""

import aiohttp

from extproc import address
from extproc.workers.asking import Asking
from extproc.workers.feed_sources import PATHS, discovered
from kvstate.feeds.feed_sources import ZmqSource


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
