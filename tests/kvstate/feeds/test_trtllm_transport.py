import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kvstate.events import Batch, EventBatch
from kvstate.feeds.drain_limits import DrainLimits
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import DrainSource, Recovery
from kvstate.feeds.queue_limits import QueueLimits
from kvstate.feeds.transport import Connected, Disconnected, Malformed, Refused
from kvstate.feeds.trtllm_transport import drain_transports
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Prompt
from tests.kvstate.grpc_publisher import received
from tests.kvstate.publishing import chain
from tests.waiting import until


def event(number: int, data: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"event_id": number, "data": data, "window_size": 64, **fields}


def created(number: int = 0, **fields: Any) -> dict[str, Any]:
    return event(number, {"type": "created", "num_blocks_per_cache_level": [9, 0]}, **fields)


def stored(number: int, block: int, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    """The event that stores a block of one token, which is the block's number."""
    tokens = [{"type": "unique_token", "token_id": block, "token_extra_id": 0}]
    blocks = [{"type": "stored_block", "block_hash": block, "tokens": tokens, "cache_level": 0}]
    return event(number, {"type": "stored", "parent_hash": parent, "blocks": blocks}, **fields)


class Server:
    """trtllm-serve's queue of events: each request takes all that are in it."""

    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.answer: web.Response | None = None
        self.polls = 0

    async def drain(self, _request: web.Request) -> web.Response:
        self.polls += 1
        if self.answer is not None:
            return self.answer
        drained, self.queue = self.queue, []
        return web.json_response(drained)

    def says(self, status: int = 200, text: str = "", **headers: str) -> None:
        """Sets the answer to all later requests."""
        self.answer = web.Response(status=status, text=text, headers=headers)


# Polls and tries at once, and hands out one signal at a time.
HASTY = DrainLimits(
    poll_seconds=(0.001, 0.002),
    retry_seconds=(0.001, 0.002),
    refused_seconds=0.002,
    queue=QueueLimits(signals_at_once=1),
)


@pytest.fixture
def server() -> Server:
    return Server()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    """Serves on 127.0.0.1; yields the URL."""
    app = web.Application()
    app.router.add_post("/kv_cache_events", server.drain)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def following(server: Server, ranks: int = 1, **limits: Any) -> AsyncIterator[Any]:
    """The transports of a worker, or the transport itself if it has one rank.

    limits: those in which the drain differs from `HASTY`.
    """
    async with serving(server) as url:
        source, hasty = DrainSource(url, ranks), replace(HASTY, **limits)
        transports = drain_transports(source, lambda: 0.5, lambda: 7.0, hasty)
        try:
            yield transports[0] if ranks == 1 else transports
        finally:
            for transport in transports:
                await transport.close()


async def test_events_follow_the_first_answer(server: Server) -> None:
    server.queue = [created(), stored(1, 5)]
    async with following(server) as transport:
        connected, first, second = await received(transport, 3)
        assert transport.recovery is Recovery.QUEUED
    assert connected == Connected()
    assert first == Batch(0, EventBatch(7.0, [], 0))
    assert isinstance(second, Batch)
    assert isinstance(second.body, EventBatch)
    assert (second.sequence, len(second.body.events)) == (1, 1)


async def test_drains_differ_in_their_stamps(server: Server) -> None:
    server.queue = [created()]
    async with following(server) as transport:
        first = (await received(transport, 2))[1]
        server.queue = [created()]
        (second,) = await received(transport, 1)
    assert first == Batch(0, EventBatch(7.0, [], 0))
    assert second == Batch(0, EventBatch(7.0 + 1e-6, [], 0))


async def test_ranks_have_events_of_their_own(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.queue = [created(attention_dp_rank=rank) for rank in (9, 1, 0, -1)]
    async with following(server, ranks=2) as (first, second):
        assert await received(first, 2) == [Connected(), Batch(0, EventBatch(7.0, [], 0))]
        assert await received(second, 2) == [Connected(), Batch(0, EventBatch(7.0, [], 1))]
        await until(lambda: len(caplog.records) == 2)
    told = [record.getMessage() for record in caplog.records]
    assert ["rank 9;" in told[0], "rank -1;" in told[1], len(told)] == [True, True, 2]


async def test_event_without_a_number_is_reported_as_malformed(server: Server) -> None:
    server.queue = [{}, created()]
    async with following(server) as transport:
        assert (await received(transport, 3))[1] == Malformed()


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (404, "", "HTTP 404"),
        (501, "", "HTTP 501"),
        (200, '{"error": "not enabled"}', "not enabled"),
        (200, '{"error": "a\\u001b[2J\\nb"}', "a?[2J b"),
        (200, f'{{"error": "{"x" * 900}"}}', "x" * 177 + "..."),
    ],
)
async def test_server_without_events_is_refused_and_asked_again(
    server: Server, status: int, text: str, reason: str
) -> None:
    server.says(status, text)
    async with following(server) as transport:
        assert (await received(transport, 1))[0] == Refused(f"publishes no events: {reason}")
        server.answer = None
        signals = await received(transport, 1)
        while Connected() not in signals:
            signals = await received(transport, 1)


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (503, "", "HTTP 503"),
        (302, "", "HTTP 302"),
        (200, "<html>", "answer is no JSON list of events"),
        (200, "[" + " " * 2000 + "]", "answer of more than 1000 bytes"),
    ],
)
async def test_unusable_answer_counts_as_a_lost_connection(
    server: Server, status: int, text: str, reason: str
) -> None:
    server.says(status, text, Location="/elsewhere")
    async with following(server, max_answer_bytes=1000) as transport:
        assert (await received(transport, 1))[0] == Disconnected(reason)


async def test_missing_server_is_reported_as_a_lost_connection(server: Server) -> None:
    async with serving(server) as url:
        pass
    (transport,) = drain_transports(DrainSource(url), lambda: 0.5, limits=HASTY)
    (signal, *_) = await received(transport, 1)
    assert isinstance(signal, Disconnected)
    assert "Cannot connect" in signal.reason
    await transport.close()


async def test_missing_answer_times_out() -> None:
    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []
    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    source, limits = DrainSource(f"http://127.0.0.1:{port}"), replace(HASTY, answer_seconds=0.05)
    (transport,) = drain_transports(source, lambda: 0.5, limits=limits)
    (signal, *_) = await received(transport, 1)
    await transport.close()
    listener.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    assert isinstance(signal, Disconnected)


async def test_idle_server_is_polled_without_further_signals(server: Server) -> None:
    async with following(server) as transport:
        assert await received(transport, 1) == [Connected()]
        await until(lambda: server.polls > 3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await transport.receive()


async def follow(url: str) -> FollowedWorkers:
    fleet = FollowedWorkers(1, lambda: 0.0)
    fleet.add("w", "m", drain_transports(DrainSource(url), lambda: 0.5, limits=HASTY))
    return fleet


def held(fleet: FollowedWorkers, prompt: Prompt) -> tuple[int, int]:
    """Certain and uncertain blocks."""
    overlap = fleet.blocks.overlaps(prompt).get("w")
    return (0, 0) if overlap is None else (sum(overlap.tiers), overlap.uncertain)


async def test_long_drain_is_read_in_slices(
    server: Server,
) -> None:
    server.queue = [created(number) for number in range(100)]
    async with following(server, slice_seconds=0.0) as transport:
        assert await received(transport, 1) == [Connected()]
        queued = set()
        while transport.queued < 100:
            queued.add(transport.queued)
            await asyncio.sleep(0)
    assert len(queued) > 50


async def test_drained_blocks_are_certain(server: Server) -> None:
    server.queue = [created(), stored(1, 1), stored(2, 2, 1)]
    async with serving(server) as url:
        fleet = await follow(url)
        await until(lambda: held(fleet, chain(3)) == (2, 0))
        assert fleet.feeds.state("w") is FeedState.LIVE
        await fleet.close()


async def test_other_consumer_degrades_the_feed_by_a_gap(server: Server) -> None:
    server.queue = [created(), stored(1, 1)]
    async with serving(server) as url:
        fleet = await follow(url)
        await until(lambda: held(fleet, chain(3)) == (1, 0))
        server.queue = [stored(7, 2, 1)]
        await until(lambda: held(fleet, chain(3)) == (0, 2))
        assert fleet.feeds.state("w") is FeedState.DEGRADED
        assert "another consumer drains this worker" in fleet.feeds.statuses("w")[0].reason
        await fleet.close()


async def test_restarted_server_is_followed_from_its_start(server: Server) -> None:
    server.queue = [created(), stored(1, 1), stored(2, 2, 1)]
    async with serving(server) as url:
        fleet = await follow(url)
        await until(lambda: held(fleet, chain(3)) == (2, 0))
        server.queue = [created(), stored(1, 1)]
        await until(lambda: held(fleet, chain(3)) == (1, 0))
        assert fleet.feeds.state("w") is FeedState.LIVE
        assert fleet.feeds.statuses("w")[0].restarts == 1
        await fleet.close()
