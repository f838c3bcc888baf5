"""The last decisions, as a list, as a stream and one by one."""

import asyncio
import json
from typing import Any

import msgspec
from aiohttp import web

from extproc.admin.bodies import answered, listed, number_of
from extproc.admin.observed import Observed
from extproc.admin.recent import Kept
from extproc.admin.summary import summary
from extproc.picking.explain import candidates, explanation_with
from extproc.workers.workers import Workers

# A stream looks for news this often instead of being told, so that those who watch cost a decision
# nothing; of more news than this at once, the oldest are left out.
LOOK_SECONDS = 0.25
MAX_NEWS = 50

# A comment is sent after so much silence, for what lies between and ends silent connections.
ALIVE_SECONDS = 15.0

# A reader that does not take what was written for so long is dropped.
WRITE_SECONDS = 10.0

MAX_READERS = 16

# Decisions that are told in one go, on the loop that picks.
AT_ONCE = 64


def decision_routes(observed: Observed, workers: Workers) -> list[web.RouteDef]:
    """GET /decisions, GET /decisions/ID."""
    readers = _Readers(observed)

    async def get_decisions(request: web.Request) -> web.StreamResponse:
        since = request.headers.get("Last-Event-ID") or request.query.get("since", "0")
        number = number_of(since, "since")
        if "text/event-stream" in request.headers.get("Accept", ""):
            return await readers.serve(request, number)
        return answered(await _listed(observed, observed.recent.since(number)))

    async def get_decision(request: web.Request) -> web.Response:
        kept = observed.recent.find(number_of(request.match_info["number"], "the decision"))
        if kept is None:
            raise web.HTTPNotFound(
                text=json.dumps({"error": "this decision is not kept any more"}),
                content_type="application/json",
            )
        shown = await listed(candidates(kept.decision, workers.state))
        return answered({**summary(kept), **explanation_with(kept.decision, shown)})

    return [
        web.get("/decisions", get_decisions),
        web.get("/decisions/{number}", get_decision),
    ]


async def _listed(observed: Observed, found: list[Kept]) -> dict[str, Any]:
    last, told = observed.recent.last, []
    for kept in found:
        told.append(summary(kept))
        if len(told) % AT_ONCE == 0:
            await asyncio.sleep(0)
    return {"last": last, "decisions": told}


class _Readers:
    """Those who read the stream of decisions (Server-Sent Events, HTML Living Standard 9.2)."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._count = 0

    async def serve(self, request: web.Request, since: int) -> web.StreamResponse:
        """Sends decisions as they are made, until the reader goes or falls behind."""
        if self._count >= MAX_READERS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_READERS} streams are open already\n")
        self._count += 1
        try:
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            )
            await response.prepare(request)
            await self._send(request, response, since)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._count -= 1
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, last: int) -> None:
        recent, loop = self._observed.recent, asyncio.get_running_loop()
        sent_at = loop.time()
        await self._write(response, "retry: 2000\n\n")
        while not self._observed.is_closed and request.transport is not None:
            if recent.last != last:
                news = recent.since(last, MAX_NEWS)
                last, sent_at = recent.last, loop.time()
                told = msgspec.json.encode(await _listed(self._observed, news)).decode()
                await self._write(response, f"id: {last}\ndata: {told}\n\n")
            elif loop.time() - sent_at > ALIVE_SECONDS:
                sent_at = loop.time()
                await self._write(response, ": nothing new\n\n")
            await asyncio.sleep(LOOK_SECONDS)

    @staticmethod
    async def _write(response: web.StreamResponse, text: str) -> None:
        async with asyncio.timeout(WRITE_SECONDS):
            await response.write(text.encode())
