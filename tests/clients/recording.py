"""What a client sends in a conversation with the scripted model, kept in memory alone."""

import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from aiohttp import web

from tests.clients.scripted_model import Body, Plan, Usage
from tests.clients.scripted_server import respond, server_of
from tests.ports import free_port
from tests.system.gateway import served

# A client that asks for more goes round in circles; it gets errors then.
MOST_REQUESTS = 60


class Sent(NamedTuple):
    """A request of a client: its API's path and its body."""

    path: str
    body: Body


class Recorder:
    """A server that answers as a scripted model by a plan and notes each request."""

    def __init__(self, plan: Plan) -> None:
        self.port = free_port()
        self.sent: list[Sent] = []
        self._plan = plan

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> web.Application:
        """Returns its server."""
        return server_of(self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if len(self.sent) >= MOST_REQUESTS:
            raise web.HTTPBadRequest
        body: Body = await request.json()
        self.sent.append(Sent(request.path, body))
        return await respond(request, body, Usage(1, 0), {}, self._plan)


@contextlib.asynccontextmanager
async def recording(plan: Plan) -> AsyncIterator[Recorder]:
    """Runs a recorder until the block ends."""
    recorder = Recorder(plan)
    async with served(recorder.app(), recorder.port):
        yield recorder
