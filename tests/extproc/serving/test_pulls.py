"""Pulls that are priced, from the events of workers to what is learned of their speed."""

import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from extproc.config.reader import parse
from extproc.fleet.workers import Workers
from extproc.observing.fleet_families import fleet_families
from extproc.observing.metrics import Metrics
from extproc.requests.request import Head, RoutingRequest
from extproc.routing.load.loads import Load
from extproc.serving.router import Router
from kvstate.events import Batch, BlocksCopied, BlocksStored, Event, EventBatch
from kvstate.feeds.transport import Connected
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Prompt
from tests.memory_transport import MemoryTransport
from tests.waiting import until

BLOCKS, SIZE = 200, 16
IDS = list(range(BLOCKS * SIZE + 1))
ASK = RoutingRequest(
    Head("POST", "/v1/completions", None), json.dumps({"model": "m", "prompt": IDS}).encode()
)
CONFIG = """
models: [{name: m}]
workers:
- {endpoint: "127.0.0.1:1", transfer_port: 5710, events: {zmq: "tcp://127.0.0.1:7"}}
- {endpoint: "127.0.0.1:2", transfer_port: 5710, events: {zmq: "tcp://127.0.0.1:8"}}
disaggregation: {connector: offloading, min_pulled_tokens: 1024, price_pulls: true}
"""
HOLDER, PULLER = "127.0.0.1:1", "127.0.0.1:2"


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Router, Workers, list[MemoryTransport]]]:
    """A router of two workers whose feeds the test writes."""
    config, feeds = parse(CONFIG, "c"), [MemoryTransport(), MemoryTransport()]
    opened = iter(feeds)
    fleet = FollowedWorkers(12345678, lambda: 0.0)
    workers = Workers(config, fleet, lambda _: [next(opened)])
    await workers.start()
    router = Router(config, workers, {}, Metrics(workers.states), Random(0))
    for feed in feeds:
        feed.put(Connected())
    await until(lambda: all(workers.candidates.state(one) == "live" for one in workers.records))
    yield router, workers, feeds
    router.close()
    await workers.close()
    await fleet.close()


def _prompt() -> Prompt:
    return Prompt("m", array("I", IDS))


def batch(number: int, *events: Event) -> Batch:
    return Batch(number, EventBatch(float(number), list(events)))


STORED = BlocksStored(list(range(BLOCKS)), None, array("I", IDS[:-1]), SIZE)
COPIED = BlocksCopied(list(range(BLOCKS)), "CPU")


async def test_worker_pulls_what_a_busy_one_has_in_host_memory_and_its_speed_is_learned() -> None:
    async with running() as (router, workers, feeds):
        feeds[0].put(batch(0, STORED))
        await until(lambda: workers.candidates.block_size(HOLDER) == SIZE)
        await until(lambda: bool(workers.candidates.overlaps(_prompt())))
        workers.loads.begin(HOLDER, 2_500.0, workers.monotonic())
        assert (await router.route(ASK))[0].worker == HOLDER  # it is on its device only
        feeds[0].put(batch(1, COPIED))
        await until(lambda: bool(workers.candidates.tokens_on_host(_prompt())))
        decision, ticket = await router.route(ASK)
        assert ticket is not None
        assert decision.worker == PULLER
        assert decision.source is not None
        assert (decision.source.endpoint, decision.source.tokens) == (HOLDER, BLOCKS * SIZE)
        feeds[1].put(batch(0, STORED))
        await until(lambda: workers.loads.transfers(HOLDER).measured == 1)
        shown = {one["name"]: one["transfers"] for one in workers.states.statuses()}
        assert shown[HOLDER]["sent_tokens"] == BLOCKS * SIZE
        assert shown[PULLER]["sent_tokens"] == 0
        families = fleet_families([(one, Load()) for one in workers.states.statuses()])
        (sent,) = [one for one in families if one.name == "kvsteer_worker_sent_tokens"]
        assert {one.labels["worker"]: one.value for one in sent.samples} == {
            HOLDER: 3_200,
            PULLER: 0,
        }
        router.release(ticket)
