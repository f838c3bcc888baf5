"""Engines for the judge: they answer recorded requests as recorded, and publish what was recorded.

All else (tokens of a text, the release, metrics, a router's own requests) a simulated worker of the
same kind answers. The one recorded request under way is known by what it asks, so it does not
matter which headers and fields a router adds.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import measure  # noqa: F401 - before the packages that it needs
from aiohttp import ClientSession, web
from judge_recordings import Recorded, Recording
from judge_world import World

from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings
from kvtools.simulator.worker import SimulatedWorker

MAX_BODY_BYTES = 4 * 1024 * 1024
ASKED = ("messages", "prompt")
KEPT_HEADERS = ("content-type",)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine is: host:port of its API, ZMQ endpoints of its events and of replays."""

    api: str
    events: str
    replay: str


@dataclass(slots=True)
class Arrival:
    """What became of a request. worker: its number. held_by: who held what could be reused."""

    worker: int
    held_by: set[int]
    reported: int


class Engines:
    """A fleet of them.

    topic: of a worker's events, by its address; vLLM's and SGLang's default is empty. shares:
    whether a worker that lacks what another one holds computes it, and holds it from then on; else
    a holder is asked by somebody else, so that a wrong worker stays one. arrival: of the request
    that was expected last, None until it arrives.
    """

    def __init__(
        self,
        recording: Recording,
        places: Sequence[Place],
        topic: Callable[[str], str],
        *,
        shares: bool = True,
    ) -> None:
        self._shares = shares
        self._recording = recording
        self.places = places
        self._topic = topic
        self._world = World(len(places))
        self._workers: list[SimulatedWorker] = []
        self._expected: Recorded | None = None
        self.arrival: Arrival | None = None

    def expect(self, request: Recorded) -> None:
        """Has the next such request answered as recorded."""
        self._expected, self.arrival = request, None

    @property
    def holders(self) -> set[int]:
        """Who holds all that can be reused of the expected request."""
        return set() if self._expected is None else self._world.holders(self._expected)

    def arrive(self, worker: int) -> Mapping[str, Any]:
        """Has a worker compute the expected request; returns its answer.

        Its events are published first, as engines do it.
        """
        request = self._expected
        assert request is not None
        self._expected = None
        held_by = self._world.holders(request)
        self.arrival = Arrival(worker, held_by, self._world.reported(request, worker))
        is_wrong = held_by and worker not in held_by
        computes = min(held_by) if is_wrong and not self._shares else worker
        for who, payload in self._world.served(request, computes, time.time()):
            publisher = self._workers[who].ranks[0].publisher
            assert publisher is not None
            publisher.publish_recorded(payload)
        return _answer(request, self.arrival.reported)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serves all engines until it is left."""
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(ClientSession())
            for number, place in enumerate(self.places):
                settings = self._settings(place)
                self._workers.append(await stack.enter_async_context(running(settings)))
                await self._serve(stack, session, number, place.api)
            yield

    def _settings(self, place: Place) -> Settings:
        """Those of the simulated worker behind an engine."""
        return Settings(
            dialect=self._recording.dialect,
            engine_version=self._recording.engine_version,
            block_size_tokens=self._recording.block_size,
            topic=self._topic(place.api),
            events_endpoint=place.events,
            replay_endpoint=place.replay,
            blocks=4096,
        )

    async def _serve(
        self, stack: AsyncExitStack, session: ClientSession, number: int, api: str
    ) -> None:
        async def handle(request: web.Request) -> web.Response:
            content = await request.read()
            if request.method == "POST" and self._is_expected(request.path, content):
                return web.json_response(self.arrive(number))
            headers = {
                name: request.headers[name] for name in KEPT_HEADERS if name in request.headers
            }
            url = f"{self._workers[number].url}{request.path_qs}"
            asked = session.request(request.method, url, data=content, headers=headers)
            async with asked as answer:
                told = await answer.read()
                return web.Response(
                    body=told,
                    status=answer.status,
                    headers={"Content-Type": answer.headers.get("Content-Type", "text/plain")},
                )

        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application, shutdown_timeout=0.2)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        host, _, port = api.rpartition(":")
        await web.TCPSite(runner, host, int(port)).start()

    def _is_expected(self, path: str, content: bytes) -> bool:
        expected = self._expected
        if expected is None or path != expected.path:
            return False
        try:
            body = json.loads(content)
        except ValueError:
            return False
        return isinstance(body, dict) and all(
            body.get(name) == expected.body.get(name) for name in ASKED
        )


def _answer(request: Recorded, reported: int) -> Mapping[str, Any]:
    """Returns the recorded answer with other cached tokens."""
    usage = request.response["usage"] | {"prompt_tokens_details": {"cached_tokens": reported}}
    return {**request.response, "usage": usage}
