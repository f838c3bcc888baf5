"""What a router foretells of a request, if anything: how many of its tokens the pick has cached."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import measure  # noqa: F401 - before the packages that it needs
from aiohttp import ClientSession
from judge_recordings import Recorded

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Claims(Protocol):
    """Asked before a request is sent, and after it arrived."""

    async def ask(self, request: Recorded, headers: Mapping[str, str]) -> None:
        """Is called before a request is sent."""

    def of(self, endpoint: str) -> int | None:
        """Returns the cached tokens that were foretold of this worker, None if nothing was."""


class Silent:
    """A router that foretells nothing."""

    async def ask(self, request: Recorded, headers: Mapping[str, str]) -> None:
        """Does nothing."""

    def of(self, endpoint: str) -> int | None:
        """Returns None."""


class Explained:
    """KVSteer's `POST /explain`: what each worker certainly holds."""

    def __init__(self, session: ClientSession, admin: str) -> None:
        self._session = session
        self._admin = admin
        self._told: dict[str, int] = {}

    async def ask(self, request: Recorded, headers: Mapping[str, str]) -> None:
        """Asks where the request would go."""
        asked = {"path": request.path, "headers": dict(headers), "body": request.body}
        async with self._session.post(f"{self._admin}/explain", json=asked) as answer:
            told = await answer.json()
        self._told = {one["endpoint"]: one["overlap_tokens"] for one in told["candidates"]}

    def of(self, endpoint: str) -> int | None:
        """Returns what this worker certainly held."""
        return self._told.get(endpoint)


class Logged(Silent):
    """vLLM Router's log at level debug, which tells of each decision what it credits."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = 0

    def of(self, endpoint: str) -> int | None:
        """Returns what was credited to this worker since the last call, None if nothing was."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            told = _COLOUR.sub("", log.read().decode(errors="replace"))
            self._read = log.tell()
        found = re.findall(rf'worker="http://{endpoint}".*credited_prefix_tokens=(\d+)', told)
        return int(found[-1]) if found else None
