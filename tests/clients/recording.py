"""What a client sends in a conversation with the scripted model, kept in memory alone."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from aiohttp import web

from tests.clients.scripted_model import Body, Plan, Usage
from tests.clients.scripted_server import respond, server_of
from tests.ports import free_port
from tests.system.gateway import served

# A client that asks for more goes round in circles; it gets errors then.
MOST_REQUESTS = 60


class Sent(NamedTuple):
    """A request of a client: its API's path, its body and its headers."""

    path: str
    body: Body
    headers: Mapping[str, str] = MappingProxyType({})


def _one_token(_: Body) -> Usage:
    return Usage(1, 0)


class Recorder:
    """A server that answers as a scripted model by a plan and notes each request.

    usage: what the answer to a body says that it took.
    """

    def __init__(self, plan: Plan, usage: Callable[[Body], Usage] = _one_token) -> None:
        self.port = free_port()
        self.sent: list[Sent] = []
        self._plan = plan
        self._usage = usage

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
        self.sent.append(Sent(request.path, body, dict(request.headers)))
        return await respond(request, body, self._usage(body), {}, self._plan)


@contextlib.asynccontextmanager
async def recording(
    plan: Plan, usage: Callable[[Body], Usage] = _one_token
) -> AsyncIterator[Recorder]:
    """Runs a recorder until the block ends."""
    recorder = Recorder(plan, usage)
    async with served(recorder.app(), recorder.port):
        yield recorder
