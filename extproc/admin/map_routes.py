"""How widely prefixes are spread over the workers, and the fleet over time."""

import asyncio
import secrets
from typing import Any

from aiohttp import web

from extproc.admin.history import STEP_SECONDS
from extproc.admin.observed import Observed
from extproc.admin.prefixes import prefixes
from extproc.admin.summary import spread
from extproc.workers.workers import Workers

MAX_PREFIXES = 24
MAX_HOLDERS = 32
MAX_HISTORIES = 100


def map_routes(observed: Observed, workers: Workers) -> list[web.RouteDef]:
    """GET /prefixes, GET /history."""
    secret = secrets.randbits(64)

    async def get_prefixes(_: web.Request) -> web.Response:
        prompts = observed.prompts.all()
        found = await asyncio.to_thread(prefixes, prompts, secret, MAX_PREFIXES)
        told = []
        for prefix in found:
            told.append(spread(prefix, workers.overlaps(prefix.prompt), MAX_HOLDERS))
            await asyncio.sleep(0)  # each asks the index, on the loop that picks
        return web.json_response({"prompts": len(prompts), "prefixes": told})

    async def get_history(request: web.Request) -> web.Response:
        names = request.query.getall("worker", []) or observed.history.names()
        return web.json_response(_history(observed, names[:MAX_HISTORIES]))

    return [web.get("/prefixes", get_prefixes), web.get("/history", get_history)]


def _history(observed: Observed, names: list[str]) -> dict[str, Any]:
    history = observed.history
    return {
        "step_seconds": STEP_SECONDS,
        "at": history.times(),
        "fleet": history.series(""),
        "workers": {name: history.series(name) for name in names},
    }
