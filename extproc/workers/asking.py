"""Asks workers over HTTP what they are: one client for all of them."""

from types import TracebackType
from typing import Self

import aiohttp

TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 1024 * 1024

# Questions under way at once, over the fleet.
MAX_QUESTIONS = 64


class Asking:
    """The client; an asynchronous context."""

    def __init__(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        self._client = aiohttp.ClientSession(
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            # without a cache: a worker that moved must not be asked where it was
            connector=aiohttp.TCPConnector(limit=MAX_QUESTIONS, use_dns_cache=False),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()

    async def get(self, endpoint: str, path: str) -> bytes | str:
        """The body of an answer, or why there is none.

        endpoint: host:port of the worker's HTTP server.

        Raises:
            OSError, aiohttp.ClientError, TimeoutError: it does not answer.
        """
        async with self._client.get(f"http://{endpoint}{path}", allow_redirects=False) as response:
            if response.status != 200:  # noqa: PLR2004 - OK
                return f"status {response.status}"
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    return f"more than {MAX_ANSWER_BYTES} bytes"
            return bytes(body)
