"""A probe server of a small router, whose workers' feeds the test writes."""

import json
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import aiohttp
from prometheus_client import generate_latest

from extproc.admin.application import listen
from extproc.admin.probe import ProbeLimits, probe_application
from extproc.admin.routes import header_names
from extproc.base.address import Address
from extproc.config.reader import parse
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.observing.probe_figures import ProbeFigures
from extproc.requests.request import Head, Models, RoutingRequest
from extproc.requests.tenant_salt import SaltMaker
from extproc.serving.probing import Probing
from extproc.serving.router import Router
from kvstate.events import Batch, BlocksStored, EventBatch
from kvstate.feeds.transport import Connected
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Prompt
from tests.memory_transport import MemoryTransport
from tests.ports import free_port
from tests.waiting import until

TOKEN, SECRET, SIZE = "a-token-of-28-printable-ones", b"0123456789abcdef", 16
IDS = list(range(64 * SIZE + 1))
CONFIG = """
models: [{name: m}, {name: n}]
workers:
- {endpoint: "127.0.0.1:1", model: m, engine: {name: vllm, version: "0.32.0"},
   events: {zmq: "tcp://127.0.0.1:7"}}
- {endpoint: "127.0.0.1:2", model: m, engine: {name: vllm, version: "0.32.0"},
   events: {zmq: "tcp://127.0.0.1:8"}}
- {endpoint: "127.0.0.1:3", model: n, engine: {name: vllm, version: "0.32.0"},
   events: {zmq: "tcp://127.0.0.1:9"}}
"""
HEAD = Head("POST", "/v1/completions", None)


def body_of(ids: Sequence[int] = IDS, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": list(ids), **fields}).encode()


BODY = body_of()
USUAL = ProbeLimits()


@dataclass(slots=True)
class Probed:
    """The server, and what is behind it."""

    url: str
    router: Router
    workers: Workers
    metrics: Metrics
    feeds: list[MemoryTransport]
    figures: ProbeFigures
    client: aiohttp.ClientSession
    numbers: list[Iterator[int]] = field(default_factory=lambda: [count(), count(), count()])

    async def ask(
        self,
        body: bytes = BODY,
        query: Sequence[tuple[str, str]] = (("path", "/v1/completions"),),
        token: str | None = TOKEN,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
    ) -> tuple[int, dict[str, Any]]:
        """The status and the answer of a probe."""
        sent = {} if token is None else {"Authorization": f"Bearer {token}"}
        asked = self.client.request(
            method, self.url, params=list(query), data=body, headers={**sent, **(headers or {})}
        )
        async with asked as response:
            return response.status, await response.json()

    async def model(self, body: bytes = BODY, **headers: str) -> dict[str, Any]:
        """The only entry of an answer. headers: without the x- of their names."""
        named = {f"x-{name}": value for name, value in headers.items()}
        status, answer = await self.ask(body, headers=named)
        assert status == 200, answer
        (one,) = answer["models"]
        return dict(one)

    async def store(self, worker: int, ids: Sequence[int], tenant: bytes | None = None) -> None:
        """Has a worker announce the whole blocks of a prompt, with the salt of a tenant if any."""
        salt = None if tenant is None else SaltMaker(SECRET).salt(tenant, None)
        blocks = len(ids) // SIZE
        stored = BlocksStored(
            [hash((salt, *ids[: (at + 1) * SIZE])) & (1 << 62) - 1 for at in range(blocks)],
            None,
            array("I", ids[: blocks * SIZE]),
            SIZE,
            extras=None if salt is None else [(salt,), *[()] * (blocks - 1)],
        )
        self.feeds[worker].put(Batch(next(self.numbers[worker]), EventBatch(0.0, [stored])))
        prompt, name = Prompt("m", array("I", ids), salt=salt), f"127.0.0.1:{worker + 1}"
        await until(lambda: name in self.workers.candidates.overlaps(prompt))

    async def route(self, body: bytes) -> None:
        """Routes a request, which is under way from then on."""
        await self.router.route(RoutingRequest(HEAD, body))

    def accounts(self) -> object:
        """What a request that is booked changes."""
        ledger, endpoints = self.router.ledger, ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
        flying = [ledger.loads.in_flight(one) for one in endpoints]
        return flying, dict(ledger.steered), len(ledger.claims), len(ledger.homes), self.totals()

    def totals(self) -> list[str]:
        """What is counted of requests, as /metrics shows it."""
        lines = generate_latest(self.metrics.registry).decode().splitlines()
        return [one for one in lines if one.partition(" ")[0].partition("{")[0].endswith("_total")]

    def counted(self) -> dict[str, float]:
        """The probes, by what became of them."""
        counts, _ = self.figures.collect()
        return {
            one.labels["outcome"]: one.value for one in counts.samples if "outcome" in one.labels
        }


@asynccontextmanager
async def probing(config: str = CONFIG, limits: ProbeLimits = USUAL) -> AsyncIterator[Probed]:
    """Runs the server until the block ends."""
    parsed, feeds = parse(config, "c"), [MemoryTransport() for _ in range(3)]
    opened = iter(feeds)
    fleet = FollowedWorkers(12345678, lambda: 0.0)
    workers = Workers(parsed, fleet, lambda _: [next(opened)])
    await workers.start()
    metrics = Metrics(workers.states)
    router = Router(parsed, workers, {}, metrics, Random(0))
    for feed in feeds:
        feed.put(Connected())
    await until(lambda: all(workers.candidates.state(one) == "live" for one in workers.records))
    figures, place = ProbeFigures(), Address("127.0.0.1", free_port())
    asks = Probing(router, Models(parsed.models), workers.states.load, 8_000.0)
    names = header_names(router, None, ("x-session-id",))
    application = probe_application(asks, TOKEN.encode(), names, limits, figures)
    runner = await listen(application, place, "probe", inflates=False)
    client = aiohttp.ClientSession()
    url = f"http://{place}/probe"
    try:
        yield Probed(url, router, workers, metrics, feeds, figures, client)
    finally:
        await client.close()
        await runner.cleanup()
        router.close()
        await workers.close()
        await fleet.close()
