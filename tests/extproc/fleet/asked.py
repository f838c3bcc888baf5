"""Records of workers that are asked something, and the client to ask them with."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web

from extproc.config.reader import parse
from extproc.config.schema import WorkerSettings as Configured
from extproc.fleet.asking.ask_interval import AskInterval
from extproc.fleet.asking.polling import Client
from extproc.fleet.asking.surroundings import Surroundings
from extproc.fleet.discovery.view import listed, merged
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker
from extproc.fleet.workers import Workers
from extproc.routing.health.evidence import Judge
from kvstate.fleet import FollowedWorkers

DEADLINE_SECONDS = 20

METRICS = "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n"


class Engine:
    """An HTTP server that answers every path the same, on its own port.

    asked: how often. before_answer: called before each answer.
    """

    def __init__(self) -> None:
        self.text = METRICS
        self.status = 200
        self.asked = 0
        self.endpoint = ""
        self.before_answer: Callable[[], object] = lambda: None

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        self.before_answer()
        return web.Response(text=self.text, status=self.status)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Engine]:
    """An engine that listens until the block ends."""
    one = Engine()
    application = web.Application()
    application.router.add_get("/{path:.*}", one.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    one.endpoint = f"{host}:{port}"
    try:
        yield one
    finally:
        await runner.cleanup()


def table_of(*names: str) -> Table:
    """The records of these workers."""
    return Table(merged({"file": listed([Configured(name, "m") for name in names])}))


def workers_of(endpoint: str, policy: str) -> Workers:
    """A fleet of one worker, with a policy in YAML."""
    text = f"models: [{{name: m}}]\nworkers: [{{endpoint: '{endpoint}'}}]\npolicy: {policy}"
    return Workers(
        parse(text, "c"),
        FollowedWorkers(1, lambda: 0.0),
        lambda _: [],
        surroundings=Surroundings(chance=lambda: 0.5),
    )


def interval(interval_seconds: float = 5.0) -> AskInterval:
    """An interval without jitter."""
    return AskInterval(interval_seconds, lambda: 0.5, lambda: 0.0)


def against(table: Table, judge: Judge) -> Mapping[str, str]:
    """The endpoints that a judge ejects, and why."""
    found = {one.endpoint: one.evidence.get(judge) for one in table.upstreams}
    return {endpoint: one.reason for endpoint, one in found.items() if one and one.reason}


def only(table: Table) -> Worker:
    """The record of the one worker."""
    (worker,) = table
    return worker


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[Client]:
    """A client that is closed when the block ends."""
    one = Client()
    try:
        yield one
    finally:
        await one.close()


@contextlib.asynccontextmanager
async def running(workers: Workers) -> AsyncIterator[Workers]:
    """Follows and asks the workers until the block ends."""
    await workers.start()
    try:
        yield workers
    finally:
        await workers.close()
