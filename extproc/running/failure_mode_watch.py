"""Watches whether Envoy fails open where `isolation.fail` promises that it does not."""

import asyncio
from collections.abc import Iterator

import aiohttp

from extproc.base.fault import Fault
from extproc.config.schema import Config
from extproc.config.sections import CLOSED
from extproc.envoy.failure_mode import fails_open

INTERVAL_SECONDS = 60.0
_ANSWER_SECONDS = 10.0
_MAX_DUMP_BYTES = 16 * 1024 * 1024

FAULT = Fault(
    "envoy-fails-open",
    "envoy",
    "it fails open: while the router is away or late, tenants' requests reach the engines without"
    " a salt",
)


def is_promised(config: Config) -> bool:
    """Returns whether no request may pass while the router is away."""
    return config.isolation is not None and config.isolation.fail == CLOSED


class FailureModeWatch:
    """Asks the Envoy at `envoy.admin` for its configuration, now and then.

    An Envoy that does not answer there is not judged: its admin server may be closed to the router.
    """

    def __init__(self, admin: str, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._url = f"http://{admin}/config_dump"
        self._interval_seconds = interval_seconds
        self._fails_open = False

    def faults(self) -> Iterator[Fault]:
        """Yields the fault, if there is one."""
        if self._fails_open:
            yield FAULT

    async def follow(self) -> None:
        """Asks until it is cancelled."""
        while True:
            self._fails_open = await self._asked()
            await asyncio.sleep(self._interval_seconds)

    async def _asked(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._url) as answer,
            ):
                dump = await _first_bytes(answer.content)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        return await asyncio.to_thread(fails_open, dump)


async def _first_bytes(content: aiohttp.StreamReader) -> bytes:
    """Returns an answer up to its limit: cut off, it cannot be read and says nothing."""
    pieces, left = [], _MAX_DUMP_BYTES
    async for piece in content.iter_any():
        pieces.append(piece[:left])
        left -= len(pieces[-1])
        if not left:
            break
    return b"".join(pieces)
