"""Questions over HTTP to servers that nobody vouches for: bounded in bytes and time."""

import time
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp

# A worker that names ten thousand adapters, and Envoy's whole configuration, are below this.
MAX_ANSWER_BYTES = 32 * 1024 * 1024
MAX_CONNECTIONS = 64
_READ_BYTES = 64 * 1024
OK = 200


class Answer(NamedTuple):
    """What a server answered.

    status: 0 where it did not. reason: why there is no body, "" if there is one. ahead_seconds: how
    far its clock is ahead of ours by its Date header, within a second; None if it has none.
    """

    status: int = 0
    body: bytes = b""
    reason: str = ""
    ahead_seconds: float | None = None

    @property
    def is_ok(self) -> bool:
        """Whether it is a whole answer with status 200."""
        return self.status == OK and not self.reason


class WebClient:
    """The client; an asynchronous context.

    seconds: for each question.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
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

    async def get(self, url: str) -> Answer:
        """What a server answers to GET; never an exception."""
        return await self._ask("GET", url, None, {})

    async def post(self, url: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        """What a server answers to a POST of JSON; never an exception."""
        return await self._ask(
            "POST", url, body, {"Content-Type": "application/json", **(headers or {})}
        )

    async def _ask(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str]
    ) -> Answer:
        try:
            async with self._client.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as response:
                ahead = _ahead(response.headers.get("Date", ""))
                content = bytearray()
                async for piece in response.content.iter_chunked(_READ_BYTES):
                    content += piece
                    if len(content) > MAX_ANSWER_BYTES:
                        reason = f"an answer of more than {MAX_ANSWER_BYTES} bytes"
                        return Answer(response.status, reason=reason)
        except TimeoutError:
            return Answer(reason=f"no answer within {self._seconds:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Answer(reason=_words(error))
        return Answer(response.status, bytes(content), "", ahead)


def _words(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _ahead(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return None
