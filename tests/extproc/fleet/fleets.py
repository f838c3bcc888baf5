"""Fleets of workers that run in the test, without servers."""

import asyncio
from typing import Any

from extproc.config import schema
from extproc.config.reader import parse
from extproc.fleet.asking.asking_times import USUAL, AskingTimes
from extproc.fleet.asking.host_names import LookUp, addresses_of
from extproc.fleet.asking.surroundings import Surroundings
from extproc.fleet.discovery.view import FleetMember, Sighting
from extproc.fleet.workers import Workers
from kvstate.feeds.feed_sources import FeedSource
from kvstate.feeds.transport import Connected
from kvstate.fleet import FollowedWorkers
from tests.memory_transport import MemoryTransport

EVENTS = '{zmq: "tcp://127.0.0.1:5557", replay: "tcp://127.0.0.1:5558"}'


def workers(
    text: str,
    transports: list[MemoryTransport] | None = None,
    more: str = "",
    times: AskingTimes = USUAL,
    models: str = "[{name: a}, {name: b}]",
    look_up: LookUp = addresses_of,
) -> Workers:
    """A fleet with these workers in YAML; `more`: other sections of its configuration."""

    def make(source: FeedSource) -> list[MemoryTransport]:
        made = [MemoryTransport() for _ in (source if isinstance(source, tuple) else [source])]
        for each in made:
            each.put(Connected())
        if transports is not None:
            transports.extend(made)
        return made

    read = parse(f"models: {models}\nworkers: [{text}]\n{more}", "c")
    fleet = FollowedWorkers(12345678, lambda: 0.0)
    return Workers(read, fleet, make, surroundings=Surroundings(look_up=look_up, times=times))


async def until_live(one: Workers) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            (status,) = one.states.statuses()
            if status["state"] == "live":
                return status
            await asyncio.sleep(0)


def members(*found: Sighting) -> dict[str, FleetMember]:
    return {one.worker.endpoint: FleetMember(one, "file") for one in found}


def following(endpoint: str, port: int = 5557, **more: Any) -> Sighting:
    worker = schema.WorkerSettings(
        endpoint, "a", events=schema.WorkerEvents(f"tcp://127.0.0.1:{port}")
    )
    return Sighting(worker, **more)
