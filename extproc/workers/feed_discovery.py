"""Asks workers where they publish their events."""

from types import TracebackType
from typing import Self

import aiohttp

from extproc import address
from extproc.workers.feed_sources import PATHS, discovered
from kvstate.feeds.feed_sources import ZmqSource

TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 1024 * 1024


class Discovery:
    """One HTTP client for all workers; an asynchronous context."""

    def __init__(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        self._client = aiohttp.ClientSession(timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()

    async def sources(self, endpoint: str) -> tuple[ZmqSource, ...] | str:
        """A worker's sources, one a rank; why there are none in words, if so.

        endpoint: host:port of its HTTP server.
        """
        host = address.parse(endpoint).host
        reasons: list[str] = []
        for path in PATHS:
            try:
                answer = await self._get(f"http://{endpoint}{path}")
            except (aiohttp.ClientError, TimeoutError) as error:
                return f"it does not answer: {error or 'timeout'}"
            if isinstance(answer, str):
                reasons.append(f"{path}: {answer}")
                continue
            found = discovered(path, answer, host)
            if found:
                return found
            reasons.append(f"{path}: names no feed")
        return "; ".join(reasons)

    async def _get(self, url: str) -> bytes | str:
        """The body of an answer, or why there is none."""
        async with self._client.get(url, allow_redirects=False) as response:
            if response.status != 200:  # noqa: PLR2004 - OK
                return f"status {response.status}"
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    return f"more than {MAX_ANSWER_BYTES} bytes"
            return bytes(body)
