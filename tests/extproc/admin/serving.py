"""An admin server of a small router, for one test."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from random import Random

from extproc.admin.application import admin_application, listen
from extproc.admin.observations import Observations
from extproc.admin.routes import (
    USUAL,
    SharingStatus,
    StreamLimits,
    discovery_routes,
    fault_routes,
    sharing_routes,
    steering_routes,
)
from extproc.base.address import Address
from extproc.base.fault import Fault
from extproc.config.reader import parse
from extproc.fleet.discovery.discovery import Discovery
from extproc.fleet.discovery.view import Source, listed
from extproc.fleet.workers import Workers
from extproc.observing.faults import Faults
from extproc.observing.metrics import Metrics
from extproc.requests.request import Head, RoutingRequest
from extproc.serving.router import Router
from kvstate.fleet import FollowedWorkers
from tests.ports import free_port

CONFIG = "models: [{name: m}]\nworkers: [{endpoint: '127.0.0.1:1'}]"


class HangingRouter(Router):
    """A router some of whose models are hung."""

    hung: frozenset[str] = frozenset()

    def is_hung(self, model: str) -> bool:
        return model in self.hung or super().is_hung(model)


@dataclass(frozen=True, slots=True)
class Served:
    """The URL of the server, and the objects behind it."""

    url: str
    router: HangingRouter
    workers: Workers
    observations: Observations

    async def route(self, tokens: int, model: str = "m") -> None:
        """Routes one request of this many tokens."""
        body = json.dumps({"model": model, "prompt": list(range(tokens))}).encode()
        await self.router.route(RoutingRequest(Head("POST", "/v1/completions", None), body))


@contextlib.asynccontextmanager
async def serving(
    config: str = CONFIG,
    max_body_bytes: int = 1000,
    sources: Sequence[Source] = (),
    sharing: SharingStatus | None = None,
    *,
    steers_all: bool = False,
    streams: StreamLimits = USUAL,
    faults: Sequence[Fault] = (),
) -> AsyncIterator[Served]:
    """Runs the server until the block ends. faults: what its parts find wrong."""
    found = Faults()
    found.add(lambda: faults)
    parsed = parse(config, "c")
    discovery = Discovery(listed(parsed.workers), sources)
    fleet = FollowedWorkers(12345678, lambda: 0.0)
    workers = Workers(parsed, fleet, lambda _: [], discovery.fault)
    await workers.start()
    observations = Observations(lambda: 5.0, kept_at_once=1_000_000)
    router = HangingRouter(
        parsed, workers, {}, Metrics(workers.states), Random(0), features=[observations]
    )
    place = Address("127.0.0.1", free_port())
    application = admin_application(
        router,
        workers,
        observations,
        max_body_bytes,
        ("127.0.0.1",),
        parsed.policy.header,
        streams=streams,
    )
    application.add_routes(
        [
            *discovery_routes(workers, discovery),
            *sharing_routes(sharing),
            *fault_routes(found),
        ]
    )
    change = router.steering.change
    application.add_routes(steering_routes(router, change, steers_all=steers_all))
    looking = asyncio.create_task(found.follow(0.01))
    await discovery.start(workers.replace)
    runner = await listen(application, place, "admin")
    try:
        yield Served(f"http://{place}", router, workers, observations)
    finally:
        observations.is_closed = True
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await runner.cleanup()
        await discovery.close()
        router.close()
        await workers.close()
