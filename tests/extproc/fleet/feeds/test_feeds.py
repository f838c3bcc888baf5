"""Feeds that workers announce themselves; real HTTP servers in place of an engine's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from extproc.base.errors import ExtraError
from extproc.config.reader import parse
from extproc.fleet.asking.asking_times import USUAL, AskingTimes
from extproc.fleet.asking.polling import MAX_ANSWER_BYTES
from extproc.fleet.asking.surroundings import Surroundings
from extproc.fleet.feeds import reported_sources
from extproc.fleet.workers import Workers
from kvstate.events import Batch
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_news import UNSEQUENCED, UNSEQUENCED_MESSAGES
from kvstate.feeds.feed_sources import FeedSource, ZmqSource
from kvstate.feeds.transport import Connected, Malformed
from kvstate.fleet import FollowedWorkers
from tests.extproc.fleet.answering import worker
from tests.extproc.fleet.asked import client
from tests.kvstate.publishing import block, payload
from tests.memory_transport import MemoryTransport
from tests.waiting import until

VLLM = {"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv"}}
SGLANG = {"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 6000}}


async def sources(endpoint: str) -> tuple[ZmqSource, ...] | str:
    async with client() as one:
        return await reported_sources.sources(one, endpoint)


async def test_vllm_worker_is_asked_for_its_sources() -> None:
    async with worker(kv_event_sources=VLLM) as endpoint:
        expected = ZmqSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv")
        assert await sources(endpoint) == (expected,)


@pytest.mark.parametrize("path", ["server_info", "get_server_info"])
async def test_sglang_worker_is_asked_for_its_server_info(path: str) -> None:
    async with worker(**{path: SGLANG}) as endpoint:
        assert await sources(endpoint) == (ZmqSource("tcp://127.0.0.1:6000", None, ""),)


async def test_reason_names_the_cause_of_a_missing_feed() -> None:
    long = {"long": "x" * MAX_ANSWER_BYTES}
    async with worker(kv_event_sources={}, server_info=long) as endpoint:
        assert await sources(endpoint) == (
            "/kv_event_sources: names no feed; /server_info: more than 1048576 bytes;"
            " /get_server_info: status 404"
        )
    refused = await sources(endpoint)
    assert isinstance(refused, str)
    assert refused.startswith("it does not answer: ")


async def test_feed_moves_with_its_workers_address() -> None:
    addresses = ["10.0.0.1"]
    opened: list[FeedSource] = []

    async def look_up(_: str) -> list[str]:
        return list(addresses)

    def open_transports(source: FeedSource) -> list[MemoryTransport]:
        opened.append(source)
        return [MemoryTransport()]

    events = '{zmq: "tcp://w:5557", replay: "tcp://w:5657"}'
    text = f'models: [{{name: a}}]\nworkers: [{{endpoint: "w:1", model: a, events: {events}}}]'
    fleet = FollowedWorkers(1, lambda: 0.0)
    times = AskingTimes(resolve_seconds=0.01)
    one = Workers(
        parse(text, "c"),
        fleet,
        open_transports,
        surroundings=Surroundings(look_up=look_up, times=times),
    )
    await one.start()
    await one.enable_events(enabled=True)
    assert opened == [(ZmqSource("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657", ""),)]
    addresses[0] = "10.0.0.2"
    await until(lambda: len(opened) > 1)
    assert opened[1:] == [(ZmqSource("tcp://10.0.0.2:5557", "tcp://10.0.0.2:5657", ""),)]
    await one.close()


async def test_messages_without_sequence_numbers_are_a_fault_of_the_worker() -> None:
    transport, fleet = MemoryTransport(), FollowedWorkers(1, lambda: 0.0)
    events = '{zmq: "tcp://127.0.0.1:5557", replay: "tcp://127.0.0.1:5657"}'
    text = f'models: [{{name: a}}]\nworkers: [{{endpoint: "127.0.0.1:1", events: {events}}}]'
    one = Workers(parse(text, "c"), fleet, lambda _: [transport])
    await one.start()
    transport.put(Connected())
    for _ in range(UNSEQUENCED_MESSAGES):
        transport.put(Malformed())
    await until(lambda: fleet.feeds.is_unsequenced("127.0.0.1:1"))
    (fault,) = one.faults()
    assert str(fault).startswith(f"worker 127.0.0.1:1: its feed: {UNSEQUENCED}; have")
    (status,) = one.states.statuses()
    assert status["feeds"][0]["reason"] == UNSEQUENCED
    transport.put(Batch(0, payload(0, block(1))))
    await until(lambda: not fleet.feeds.is_unsequenced("127.0.0.1:1"))
    assert not list(one.faults())
    await one.close()


SOON = AskingTimes(feed_soon_seconds=0.01)
OFTEN = AskingTimes(feed_soon_seconds=0.01, feed_seldom_seconds=0.01)


class Opened(list[FeedSource]):
    """The sources that were opened; is_refused: whether opening another one fails."""

    is_refused = False


@asynccontextmanager
async def feeds(
    *endpoints: str, events: str = "{}", times: AskingTimes = USUAL
) -> AsyncIterator[tuple[Workers, FollowedWorkers, Opened]]:
    opened = Opened()

    def open_transports(source: FeedSource) -> list[MemoryTransport]:
        if opened.is_refused:
            raise OSError(f"cannot open {source}")
        opened.append(source)
        transport = MemoryTransport()
        transport.put(Connected())
        return [transport]

    workers = ", ".join(f"{{endpoint: '{endpoint}', events: auto}}" for endpoint in endpoints)
    text = f"models: [{{name: a}}]\nworkers: [{workers}]\nevents: {events}"
    fleet = FollowedWorkers(1, lambda: 0.0)
    made = Workers(parse(text, "c"), fleet, open_transports, surroundings=Surroundings(times=times))
    await made.start()
    yield made, fleet, opened
    await made.close()


def reason(made: Workers, endpoint: str) -> str:
    (status,) = (one for one in made.states.statuses() if one["name"] == endpoint)
    return str(status["reason"])


async def test_feed_opens_where_its_worker_announces_it() -> None:
    async with worker(kv_event_sources=VLLM) as endpoint, feeds(endpoint) as (made, fleet, opened):
        await until(lambda: fleet.feeds.state(endpoint) is FeedState.LIVE)
        assert opened == [(ZmqSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv"),)]
        assert reason(made, endpoint) == ""


async def test_feed_follows_a_worker_that_moves_it() -> None:
    answer = {"0": dict(VLLM["0"])}
    async with (
        worker(kv_event_sources=answer) as endpoint,
        feeds(endpoint, times=OFTEN) as (_, fleet, opened),
    ):
        await until(lambda: fleet.feeds.state(endpoint) is FeedState.LIVE)
        answer["0"]["endpoint"] = "tcp://*:7000"
        await until(lambda: len(opened) == 2)
        assert opened[1] == (ZmqSource("tcp://127.0.0.1:7000", "tcp://127.0.0.1:5558", "kv"),)


def lacks_grpcio(_source: FeedSource) -> list[MemoryTransport]:
    raise ExtraError("a feed over gRPC", "grpc")


async def test_reason_names_the_missing_extra_of_a_feed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = 'models: [{name: a}]\nworkers: [{endpoint: "127.0.0.1:1", events: {grpc: "127.0.0.1:2"}}]'
    made = Workers(parse(one, "c"), FollowedWorkers(1, lambda: 0.0), lacks_grpcio)
    await made.start()
    told = "a feed over gRPC: needs the extra: pip install '.[grpc]' in a clone"
    assert reason(made, "127.0.0.1:1") == told
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == [
        f"worker 127.0.0.1:1: {told}"
    ]
    assert caplog.records[-1].exc_info is None
    await made.close()


async def test_feed_that_fails_to_open_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        worker(kv_event_sources=VLLM) as endpoint,
        feeds(endpoint, times=SOON) as (made, fleet, opened),
    ):
        await until(lambda: fleet.feeds.state(endpoint) is FeedState.LIVE)
        await made.enable_events(enabled=False)
        opened.is_refused = True
        await made.enable_events(enabled=True)
        told = f"worker {endpoint}: events: auto: its feed cannot be followed"
        await until(lambda: told in caplog.messages)
        opened.is_refused = False
        await until(lambda: fleet.feeds.state(endpoint) is FeedState.LIVE)


async def test_feed_that_moves_back_from_an_unreachable_place_is_followed() -> None:
    answer = {"0": dict(VLLM["0"])}
    async with (
        worker(kv_event_sources=answer) as endpoint,
        feeds(endpoint, times=OFTEN) as (made, fleet, opened),
    ):
        await until(lambda: fleet.feeds.state(endpoint) is FeedState.LIVE)
        opened.is_refused = True
        answer["0"]["endpoint"] = "tcp://*:7000"
        await until(lambda: reason(made, endpoint) == "its feed cannot be followed: OSError")
        opened.is_refused = False
        answer["0"]["endpoint"] = VLLM["0"]["endpoint"]
        await until(lambda: fleet.feeds.state(endpoint) is FeedState.LIVE)
        assert reason(made, endpoint) == ""


@pytest.mark.parametrize(
    ("answer", "host"),
    [
        ({"0": {"endpoint": "tcp://127.0.0.2:5557"}}, "127.0.0.2"),
        ({"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://intranet:80"}}, "intranet"),
    ],
)
async def test_feed_host_must_be_of_the_worker_or_listed(answer: dict[str, Any], host: str) -> None:
    why = f"it publishes on {host}, which is neither its own host nor in events.auto_hosts"
    async with worker(kv_event_sources=answer) as endpoint:
        async with feeds(endpoint) as (made, _, opened):
            await until(lambda: reason(made, endpoint) == why)
            assert opened == []
        async with feeds(endpoint, events=f"{{auto_hosts: [{host}]}}") as (_, fleet, opened):
            await until(lambda: fleet.feeds.state(endpoint) is FeedState.LIVE)


async def test_feed_host_matches_by_name_or_address() -> None:
    answer = {"0": {"endpoint": "tcp://127.0.0.1:5557"}}
    async with worker(kv_event_sources=answer) as endpoint:
        named = endpoint.replace("127.0.0.1", "localhost")
        async with feeds(named) as (_, fleet, _):
            await until(lambda: fleet.feeds.state(named) is FeedState.LIVE)


async def test_feed_of_another_worker_is_not_credited_to_its_announcer() -> None:
    claimed: dict[str, Any] = {}
    async with (
        worker(kv_event_sources=VLLM) as one,
        worker(kv_event_sources=claimed) as other,
        feeds(one, other, times=SOON) as (made, fleet, opened),
    ):
        await until(lambda: fleet.feeds.state(one) is FeedState.LIVE)
        claimed["0"] = {"endpoint": "tcp://127.0.0.1:5557", "topic": "kv"}
        await until(lambda: reason(made, other) == f"its feed is that of worker {one}")
        assert (len(opened), fleet.feeds.ranks(other)) == (1, 0)
        claimed["0"] = {"endpoint": "tcp://127.0.0.1:6557", "topic": "kv"}
        await until(lambda: fleet.feeds.state(other) is FeedState.LIVE)


async def test_ranks_beyond_64_are_refused_unless_more_are_configured() -> None:
    answer = {str(rank): {"endpoint": f"tcp://*:{7000 + rank}"} for rank in range(65)}
    async with worker(kv_event_sources=answer) as endpoint:
        async with feeds(endpoint) as (made, _, opened):
            why = "it names 65 ranks, more than events.auto_ranks (64)"
            await until(lambda: reason(made, endpoint) == why)
            assert opened == []
        async with feeds(endpoint, events="{auto_ranks: 65}") as (_, fleet, _):
            await until(lambda: fleet.feeds.state(endpoint) is FeedState.LIVE)


async def test_worker_is_asked_until_it_has_a_feed(caplog: pytest.LogCaptureFixture) -> None:
    answer: dict[str, Any] = {}
    async with (
        worker(kv_event_sources=answer) as endpoint,
        feeds(endpoint, times=SOON) as (made, fleet, _),
    ):
        await until(lambda: reason(made, endpoint).startswith("/kv_event_sources: names no feed"))
        assert "events: auto: /kv_event_sources: names no feed" in caplog.text
        answer.update(VLLM)
        await until(lambda: fleet.feeds.state(endpoint) is FeedState.LIVE)
        assert reason(made, endpoint) == ""


async def test_feed_is_kept_while_its_worker_does_not_answer() -> None:
    answer = dict(VLLM)
    asked: list[str] = []
    async with (
        worker(asked, kv_event_sources=answer) as endpoint,
        feeds(endpoint, times=OFTEN) as (made, fleet, _),
    ):
        await until(lambda: fleet.feeds.state(endpoint) is FeedState.LIVE)
        answer.clear()
        before = asked.count("/kv_event_sources")
        await until(lambda: asked.count("/kv_event_sources") >= before + 4)
        assert (fleet.feeds.state(endpoint), reason(made, endpoint)) == (FeedState.LIVE, "")


async def test_disabled_events_stop_all_questions() -> None:
    async with (
        worker(kv_event_sources=VLLM) as endpoint,
        feeds(endpoint, times=OFTEN) as (made, fleet, opened),
    ):
        await until(lambda: fleet.feeds.state(endpoint) is FeedState.LIVE)
        await made.enable_events(enabled=False)
        assert fleet.feeds.state(endpoint) is FeedState.UNSUPPORTED
        assert reason(made, endpoint) == "events are switched off"
        await made.enable_events(enabled=True)
        await until(lambda: len(opened) == 2)
