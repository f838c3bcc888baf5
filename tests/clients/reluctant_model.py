"""A scripted model that is silent for a while, or refuses requests at first as the router does."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from extproc.requests.refusals import no_room
from tests.clients.scripted_model import Body, Usage
from tests.clients.scripted_server import respond, server_of
from tests.ports import free_port
from tests.system.gateway import served

_LOOK_SECONDS = 0.05


@dataclass
class Attempt:
    """A request.

    is_agent: whether it has tools, as all turns of a conversation have. began_at, ended_at: on the
    monotonic clock; the second one None until it ends. is_cut: whether the client left before it
    was answered.
    """

    path: str
    is_agent: bool
    began_at: float
    ended_at: float | None = None
    is_cut: bool = False

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (time.monotonic() if self.ended_at is None else self.ended_at) - self.began_at


class ReluctantModel:
    """Answers each request after silent_seconds, and refuses the first ones.

    refusals: how many are refused of those that have tools, and of the others. attempts: all
    requests, the oldest first.
    """

    def __init__(self, silent_seconds: float = 0.0, refusals: float = 0) -> None:
        self.port = free_port()
        self.attempts: list[Attempt] = []
        self._silent_seconds = silent_seconds
        self._refusals = refusals

    @property
    def url(self) -> str:
        """Its address, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> web.Application:
        """Returns its server."""
        return server_of(self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body: Body = await request.json()
        attempt = Attempt(request.path, bool(body.get("tools")), time.monotonic())
        self.attempts.append(attempt)
        try:
            attempt.is_cut = not await self._silence(request)
            if attempt.is_cut:
                return web.Response()
            alike = [one for one in self.attempts if one.is_agent is attempt.is_agent]
            if len(alike) <= self._refusals:
                refusal = no_room(request.path)
                return web.Response(
                    status=refusal.status, headers=dict(refusal.headers), body=refusal.body
                )
            return await respond(request, body, Usage(1, 0), {})
        finally:
            attempt.ended_at = time.monotonic()

    async def _silence(self, request: web.Request) -> bool:
        """Says nothing for a while; returns whether the client still waits then."""
        until = time.monotonic() + self._silent_seconds
        while time.monotonic() < until:
            if request.transport is None or request.transport.is_closing():
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return True


@contextlib.asynccontextmanager
async def reluctant(
    silent_seconds: float = 0.0, refusals: float = 0
) -> AsyncIterator[ReluctantModel]:
    """Runs a model until the block ends."""
    model = ReluctantModel(silent_seconds, refusals)
    async with served(model.app(), model.port):
        yield model
