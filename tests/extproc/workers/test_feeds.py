"""Feeds that workers announce themselves; real HTTP servers in place of an engine's."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from extproc.config.reader import parse
from extproc.errors import ExtraError
from extproc.workers import feeds as feed_discovery
from extproc.workers import polling
from extproc.workers.workers import Workers
from kvstate.feeds.feed import State
from kvstate.feeds.feed_sources import FeedSource, ZmqSource
from kvstate.feeds.transport import Connected, MemoryTransport
from kvstate.fleet import Fleet
from tests.extproc.workers.answering import worker
from tests.extproc.workers.asked import client

VLLM = {"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv"}}
SGLANG = {"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 6000}}


async def sources(endpoint: str) -> tuple[ZmqSource, ...] | str:
    async with client() as one:
        return await feed_discovery.sources(one, endpoint)


async def test_vllm_is_asked_for_its_sources() -> None:
    async with worker(kv_event_sources=VLLM) as endpoint:
        expected = ZmqSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv")
        assert await sources(endpoint) == (expected,)


@pytest.mark.parametrize("path", ["server_info", "get_server_info"])
async def test_sglang_is_asked_for_its_server_info(path: str) -> None:
    async with worker(**{path: SGLANG}) as endpoint:
        assert await sources(endpoint) == (ZmqSource("tcp://127.0.0.1:6000", None, ""),)


async def test_why_there_is_no_feed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "MAX_ANSWER_BYTES", 50)
    async with worker(kv_event_sources={}, server_info={"long": "x" * 100}) as endpoint:
        assert await sources(endpoint) == (
            "/kv_event_sources: names no feed; /server_info: more than 50 bytes;"
            " /get_server_info: status 404"
        )
    refused = await sources(endpoint)
    assert isinstance(refused, str)
    assert refused.startswith("it does not answer: ")


@asynccontextmanager
async def feeds(
    *endpoints: str, events: str = "{}"
) -> AsyncIterator[tuple[Workers, Fleet, list[FeedSource]]]:
    opened: list[FeedSource] = []

    def open_transports(source: FeedSource) -> list[MemoryTransport]:
        opened.append(source)
        transport = MemoryTransport()
        transport.put(Connected())
        return [transport]

    workers = ", ".join(f"{{endpoint: '{endpoint}', events: auto}}" for endpoint in endpoints)
    text = f"models: [{{name: a}}]\nworkers: [{workers}]\nevents: {events}"
    fleet = Fleet(1, lambda: 0.0)
    made = Workers(parse(text, "c"), fleet, open_transports)
    await made.start()
    yield made, fleet, opened
    await made.close()


def reason(made: Workers, endpoint: str) -> str:
    (status,) = (one for one in made.status() if one["name"] == endpoint)
    return str(status["reason"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.002)


async def test_worker_is_followed_where_it_says() -> None:
    async with worker(kv_event_sources=VLLM) as endpoint, feeds(endpoint) as (made, fleet, opened):
        await until(lambda: fleet.state(endpoint) is State.LIVE)
        assert opened == [(ZmqSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv"),)]
        assert reason(made, endpoint) == ""


async def test_worker_that_moves_its_feed_is_followed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.workers.feeds.ASK_SOON_SECONDS", 0.01)
    monkeypatch.setattr("extproc.workers.feeds.ASK_SELDOM_SECONDS", 0.01)
    answer = {"0": dict(VLLM["0"])}
    async with worker(kv_event_sources=answer) as endpoint, feeds(endpoint) as (_, fleet, opened):
        await until(lambda: fleet.state(endpoint) is State.LIVE)
        answer["0"]["endpoint"] = "tcp://*:7000"
        await until(lambda: len(opened) == 2)
        assert opened[1] == (ZmqSource("tcp://127.0.0.1:7000", "tcp://127.0.0.1:5558", "kv"),)


def cannot_open(source: FeedSource) -> list[MemoryTransport]:
    raise OSError(f"cannot open {source}")


def lacks_grpcio(_source: FeedSource) -> list[MemoryTransport]:
    raise ExtraError("a feed over gRPC", "grpc")


async def test_worker_found_with_a_feed_that_needs_an_extra_tells_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = 'models: [{name: a}]\nworkers: [{endpoint: "127.0.0.1:1", events: {grpc: "127.0.0.1:2"}}]'
    made = Workers(parse(one, "c"), Fleet(1, lambda: 0.0), lacks_grpcio)
    await made.start()
    told = "a feed over gRPC: needs the extra: pip install 'kvsteer[grpc]'"
    assert reason(made, "127.0.0.1:1") == told
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == [
        f"worker 127.0.0.1:1: {told}"
    ]
    assert caplog.records[-1].exc_info is None
    await made.close()


async def test_worker_whose_feed_cannot_be_opened_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("extproc.workers.feeds.ASK_SOON_SECONDS", 0.01)
    async with worker(kv_event_sources=VLLM) as endpoint, feeds(endpoint) as (made, fleet, _):
        await until(lambda: fleet.state(endpoint) is State.LIVE)
        await made.enable_events(enabled=False)
        can_open, made._feeds._open_transports = made._feeds._open_transports, cannot_open
        await made.enable_events(enabled=True)
        told = f"worker {endpoint}: events: auto: its feed cannot be followed"
        await until(lambda: told in caplog.messages)
        made._feeds._open_transports = can_open
        await until(lambda: fleet.state(endpoint) is State.LIVE)


async def test_worker_that_moves_its_feed_back_from_where_it_cannot_be_opened_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.workers.feeds.ASK_SOON_SECONDS", 0.01)
    monkeypatch.setattr("extproc.workers.feeds.ASK_SELDOM_SECONDS", 0.01)
    answer = {"0": dict(VLLM["0"])}
    async with worker(kv_event_sources=answer) as endpoint, feeds(endpoint) as (made, fleet, _):
        await until(lambda: fleet.state(endpoint) is State.LIVE)
        can_open, made._feeds._open_transports = made._feeds._open_transports, cannot_open
        answer["0"]["endpoint"] = "tcp://*:7000"
        await until(lambda: reason(made, endpoint) == "its feed cannot be followed: OSError")
        made._feeds._open_transports = can_open
        answer["0"]["endpoint"] = VLLM["0"]["endpoint"]
        await until(lambda: fleet.state(endpoint) is State.LIVE)
        assert reason(made, endpoint) == ""


@pytest.mark.parametrize(
    ("answer", "host"),
    [
        ({"0": {"endpoint": "tcp://127.0.0.2:5557"}}, "127.0.0.2"),
        ({"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://intranet:80"}}, "intranet"),
    ],
)
async def test_worker_may_name_its_own_host_only_and_those_listed(
    answer: dict[str, Any], host: str
) -> None:
    why = f"it publishes on {host}, which is neither its own host nor in events.auto_hosts"
    async with worker(kv_event_sources=answer) as endpoint:
        async with feeds(endpoint) as (made, _, opened):
            await until(lambda: reason(made, endpoint) == why)
            assert opened == []
        async with feeds(endpoint, events=f"{{auto_hosts: [{host}]}}") as (_, fleet, opened):
            await until(lambda: fleet.state(endpoint) is State.LIVE)


async def test_hosts_own_name_and_its_address_are_the_same_host() -> None:
    answer = {"0": {"endpoint": "tcp://127.0.0.1:5557"}}
    async with worker(kv_event_sources=answer) as endpoint:
        named = endpoint.replace("127.0.0.1", "localhost")
        async with feeds(named) as (_, fleet, _):
            await until(lambda: fleet.state(named) is State.LIVE)


async def test_worker_that_names_another_workers_publisher_is_not_credited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.workers.feeds.ASK_SOON_SECONDS", 0.01)
    claimed: dict[str, Any] = {}
    async with (
        worker(kv_event_sources=VLLM) as one,
        worker(kv_event_sources=claimed) as other,
        feeds(one, other) as (made, fleet, opened),
    ):
        await until(lambda: fleet.state(one) is State.LIVE)
        claimed["0"] = {"endpoint": "tcp://127.0.0.1:5557", "topic": "kv"}
        await until(lambda: reason(made, other) == f"its feed is that of worker {one}")
        assert (len(opened), fleet.ranks(other)) == (1, 0)
        claimed["0"] = {"endpoint": "tcp://127.0.0.1:6557", "topic": "kv"}
        await until(lambda: fleet.state(other) is State.LIVE)


async def test_worker_names_64_ranks_at_most_unless_more_are_configured() -> None:
    answer = {str(rank): {"endpoint": f"tcp://*:{7000 + rank}"} for rank in range(65)}
    async with worker(kv_event_sources=answer) as endpoint:
        async with feeds(endpoint) as (made, _, opened):
            why = "it names 65 ranks, more than events.auto_ranks (64)"
            await until(lambda: reason(made, endpoint) == why)
            assert opened == []
        async with feeds(endpoint, events="{auto_ranks: 65}") as (_, fleet, _):
            await until(lambda: fleet.state(endpoint) is State.LIVE)


async def test_worker_is_asked_until_it_has_a_feed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("extproc.workers.feeds.ASK_SOON_SECONDS", 0.01)
    answer: dict[str, Any] = {}
    async with worker(kv_event_sources=answer) as endpoint, feeds(endpoint) as (made, fleet, _):
        await until(lambda: reason(made, endpoint).startswith("/kv_event_sources: names no feed"))
        assert "events: auto: /kv_event_sources: names no feed" in caplog.text
        answer.update(VLLM)
        await until(lambda: fleet.state(endpoint) is State.LIVE)
        assert reason(made, endpoint) == ""


async def test_feed_is_kept_while_its_worker_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.workers.feeds.ASK_SELDOM_SECONDS", 0.01)
    answer = dict(VLLM)
    asked: list[str] = []
    async with (
        worker(asked, kv_event_sources=answer) as endpoint,
        feeds(endpoint) as (made, fleet, _),
    ):
        await until(lambda: fleet.state(endpoint) is State.LIVE)
        answer.clear()
        before = asked.count("/kv_event_sources")
        await until(lambda: asked.count("/kv_event_sources") >= before + 4)
        assert (fleet.state(endpoint), reason(made, endpoint)) == (State.LIVE, "")


async def test_switched_off_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.workers.feeds.ASK_SELDOM_SECONDS", 0.01)
    async with worker(kv_event_sources=VLLM) as endpoint, feeds(endpoint) as (made, fleet, opened):
        await until(lambda: fleet.state(endpoint) is State.LIVE)
        await made.enable_events(enabled=False)
        assert fleet.state(endpoint) is State.UNSUPPORTED
        assert reason(made, endpoint) == "events are switched off"
        await made.enable_events(enabled=True)
        await until(lambda: len(opened) == 2)
