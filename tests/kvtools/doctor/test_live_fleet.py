"""The doctor next to a working fleet: what it receives without provoking it, and bridges."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.config.schema import Model, RemoteTokenizerSettings, WorkerEvents, WorkerSettings
from kvstate.bridge.bridge import Bridge, BridgeServer
from kvstate.bridge.rank import BridgeLimits
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.zmq_transport import ZmqTransport
from kvtools.doctor.findings import Severity
from kvtools.doctor.worker_visit import Bounds
from kvtools.simulator import worker as simulated
from tests.kvtools.doctor.fleet import (
    codes_of,
    findings_of,
    one_worker,
    with_events,
)


@contextlib.asynccontextmanager
async def traffic(worker: simulated.SimulatedWorker) -> AsyncIterator[None]:
    """Has a client ask for one completion after another until the block ends."""

    async def ask(session: aiohttp.ClientSession) -> None:
        for number in itertools.count():
            prompt = f"{number} " + "and so on " * 40
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            async with session.post(f"{worker.url}/v1/completions", json=body) as response:
                await response.read()

    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(ask(session))
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


@contextlib.asynccontextmanager
async def bridge(worker: simulated.SimulatedWorker) -> AsyncIterator[str]:
    """Runs `kvsteer bridge` in this process; yields its host:port."""
    source = ZmqSource(str(worker.events_endpoint), worker.replay_endpoint, "")
    transports = [ZmqTransport(source)]
    one = Bridge(transports, time.time, random.random, BridgeLimits())
    following = asyncio.create_task(one.run())
    server = BridgeServer(one, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.slow
async def test_traffic_reveals_wrong_block_size_and_topic_without_a_probe() -> None:
    long = Bounds(listen_seconds=3.0)
    async with one_worker(dialect="vllm-0.24", topic="kv") as (running, worker), traffic(running):
        assert await codes_of(replace(worker, block_size=32), bounds=long) == {"block-size"}
        assert await codes_of(with_events(worker, topic="other"), bounds=long) == {"topic-wrong"}


@pytest.mark.slow
async def test_bridge_is_a_feed_like_any_other() -> None:
    async with one_worker() as (running, worker), bridge(running) as target:
        bridged = replace(worker, events=WorkerEvents(grpc=target))
        found = await findings_of(bridged, probes=True)
        assert not [one for one in found if one.verdict is Severity.WRONG]
        assert {"probe", "feed", "block size"} <= {one.check for one in found}
        assert not await codes_of(bridged)


@contextlib.asynccontextmanager
async def slow_engine(**answers: Any) -> AsyncIterator[WorkerSettings]:
    """An engine that is slow to tokenize, and answers conversations with an error."""

    async def tokenize(request: web.Request) -> web.Response:
        if "messages" in await request.json():
            return web.Response(status=400)
        await asyncio.sleep(0.1)
        return web.json_response({"tokens": [1], "count": 1})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    application = web.Application()
    application.router.add_post("/tokenize", tokenize)
    application.router.add_get("/v1/models", models)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield WorkerSettings(f"127.0.0.1:{runner.addresses[0][1]}", **answers)
    await runner.cleanup()


@pytest.mark.slow
async def test_slow_or_refusing_remote_tokenizer_is_found() -> None:
    remote = Model("tiny", tokenizer=RemoteTokenizerSettings(deadline_ms=50))
    async with slow_engine() as worker:
        found = await codes_of(worker, models=(remote,))
    assert found == {"tokenizer-slow", "tokenizer-refuses"}


@pytest.mark.slow
async def test_engine_that_refuses_completions_is_found_by_a_probe() -> None:
    async with one_worker() as (running, _), slow_engine() as engine:
        events = WorkerEvents(zmq=running.events_endpoint, replay=running.replay_endpoint)
        found = await codes_of(replace(engine, events=events), probes=True, models=(Model("tiny"),))
    assert found == {"probe-refused"}
