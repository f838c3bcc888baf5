"""One play of a recording through a router."""

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path

import measure  # noqa: F401 - before the packages that it needs
from aiohttp import ClientError, ClientSession, ClientTimeout
from judge_claims import Claims
from judge_engines import Engines
from judge_recordings import Recorded, Recording
from judge_score import Score
from measure import CannotRunError
from peers_settings import SESSION

from kvtools.simulator.settings import Settings

WAIT_SECONDS = 120.0
PATIENCE = ClientTimeout(total=30)
# No router tells when it has read the events of the last request.
SETTLED_SECONDS = 0.2
PROBE = {
    "model": Settings().model,
    "max_tokens": 1,
    "messages": [{"role": "user", "content": "Is anybody there?"}],
}


Foretelling = Callable[[ClientSession], Claims]
Start = Callable[[ExitStack, Path], tuple[str, Foretelling]]
"""Starts a router; returns its URL, and what makes its claims."""


async def judged(
    recording: Recording, engines: Engines, start: Start, last: int | None, *, finds: bool
) -> Score:
    """Starts engines and a router, plays a recording, and returns the score.

    last: the number of requests, None for all. finds: whether unheld requests go to the workers in
    turn, and not through the router.
    """
    with tempfile.TemporaryDirectory(prefix="kvsteer-bench-") as directory, ExitStack() as stack:
        async with engines.running(), ClientSession(timeout=PATIENCE) as session:
            url, foretelling = await asyncio.to_thread(start, stack, Path(directory))
            try:
                await _answers(session, url)
                play = Play(session, url, engines, foretelling(session), finds=finds)
                for request in recording.requests[:last]:
                    await play.send(request)
                return play.score
            finally:
                await asyncio.to_thread(stack.close)


async def _answers(session: ClientSession, url: str) -> None:
    """Waits until a router passes requests on."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ClientError, TimeoutError):
            async with session.post(f"{url}/v1/chat/completions", json=PROBE) as answer:
                if answer.status == HTTPStatus.OK:
                    return
        await asyncio.sleep(0.5)
    raise CannotRunError(f"no request was answered through {url}")


class Play:
    """One play of a recording through a router, request by request."""

    def __init__(
        self, session: ClientSession, url: str, engines: Engines, claims: Claims, *, finds: bool
    ) -> None:
        self.score = Score()
        self._session = session
        self._url = url
        self._engines = engines
        self._claims = claims
        self._finds = finds
        self._turns = itertools.cycle(range(len(engines.places)))

    async def send(self, request: Recorded) -> None:
        """Sends one request, and counts what became of it."""
        engines = self._engines
        engines.expect(request)
        if self._finds and not request.cached:
            engines.arrive(next(self._turns))
            return
        await asyncio.sleep(SETTLED_SECONDS)
        headers = {SESSION: f"session-{request.session}"}
        await self._claims.ask(request, headers)
        with contextlib.suppress(ClientError, TimeoutError):
            url = f"{self._url}{request.path}"
            async with self._session.post(url, json=request.body, headers=headers) as answer:
                await answer.read()
        arrival = engines.arrival
        if arrival is None:
            self.score.note(request, None, None)
            engines.arrive(next(self._turns))  # what follows is as recorded
            return
        self.score.note(request, arrival, self._claims.of(engines.places[arrival.worker].api))
