"""How widely prefixes are spread over the workers, and the fleet over time."""

import asyncio
import secrets

import msgspec
from aiohttp import web

from extproc.admin.bodies import answered, no_such_worker
from extproc.admin.history import FLEET, STEP_SECONDS
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
        return answered({"prompts": len(prompts), "prefixes": told})

    async def get_history(request: web.Request) -> web.Response:
        history = observed.history
        asked, kept = request.query.getall("worker", []), history.names()
        # of several one may have gone since they were listed
        if asked and not workers.names().union(kept).intersection(asked):
            raise no_such_worker()
        names = asked or kept
        told = {}
        for name in names[:MAX_HISTORIES]:
            told[name] = msgspec.Raw(msgspec.json.encode(history.series(name)))
            await asyncio.sleep(0)  # as above: a hundred of them take milliseconds
        fleet, at = history.series(FLEET), history.times()
        return answered({"step_seconds": STEP_SECONDS, "at": at, "fleet": fleet, "workers": told})

    return [web.get("/prefixes", get_prefixes), web.get("/history", get_history)]
