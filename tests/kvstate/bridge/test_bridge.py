"""The bridge over real gRPC, fed from memory."""

import asyncio

import grpc
import pytest

from kvstate.bridge.rank import BridgeLimits
from kvstate.events import Batch
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.grpc_transport import SERVICES
from kvstate.feeds.transport import Connected, Disconnected, Refused
from tests.kvstate.bridging import FIRST, Engine, engine
from tests.kvstate.publishing import PATIENCE_SECONDS, block, payload
from tests.waiting import until

CLEAR = ["AllBlocksCleared"]


def held(*hashes: int) -> dict[tuple[int, str, None], int]:
    return {(number, "GPU", None): 1 for number in hashes}


def channel_to(running: Engine) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{running.server.port}")


async def health(running: Engine) -> bytes:
    async with channel_to(running) as channel:
        status: bytes = await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        return status


async def test_gateways_see_the_same_batches_under_the_same_numbers() -> None:
    async with engine() as running:
        first, second = running.subscribe(), running.subscribe()
        await asyncio.gather(first.read(), second.read())
        for number in range(1, 20):
            running.publish(block(number, number - 1 or None))
        await running.follows()
        for gateway in (first, second):
            await gateway.read_until(running.last)
            assert gateway.held() == held(*range(1, 20))
        assert first.batches == second.batches
        assert first.numbers()[:2] == [FIRST - 1, FIRST]


async def test_newcomer_gets_a_snapshot_and_the_batches_after_it() -> None:
    async with engine() as running:
        running.publish(block(1), block(2, 1))
        running.publish(["BlockRemoved", [2]])
        await running.follows()
        gateway = running.subscribe()
        (snapshot,) = await gateway.read()
        assert (snapshot.snapshot.count, snapshot.snapshot.unknown_before) == (1, 0)
        assert gateway.held() == held(1)
        running.publish(block(3, 1))
        await gateway.read()
        assert gateway.held() == held(1, 3)


async def test_returning_gateway_resumes_at_its_number() -> None:
    async with engine() as running:
        gateway = running.subscribe()
        await gateway.read()
        running.publish(block(1))
        await gateway.read()
        gateway.stream.cancel()
        running.publish(block(2, 1))
        await running.follows()
        back = running.subscribe(FIRST)
        await back.read_until(running.last)
        assert back.numbers()[0] == FIRST
        assert back.held() == held(1, 2)
        assert (await running.subscribe(running.last + 2).end())[0] == "OUT_OF_RANGE"


async def test_leaving_gateway_does_not_affect_the_others() -> None:
    async with engine() as running:
        gone, stays = running.subscribe(), running.subscribe()
        await asyncio.gather(gone.read(), stays.read())
        await gone.channel.close()
        running.publish(block(1))
        await running.follows()
        await stays.read_until(running.last)
        assert stays.held() == held(1)


async def test_idle_stream_that_resumes_is_answered_at_once() -> None:
    async with engine() as running:
        running.publish(block(1))
        await running.follows()
        gateway = running.subscribe(running.last + 1)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await gateway.stream.initial_metadata()


async def test_restarted_engine_is_a_clear_under_the_next_number() -> None:
    async with engine() as running:
        gateway = running.subscribe()
        running.publish(block(1))
        await running.follows()
        await gateway.read_until(running.last)
        running.restart()
        running.publish(block(7), life=1)
        running.publish(block(8, 7), life=1)
        await running.follows()
        await gateway.read_until(running.last)
        assert gateway.held() == held(7, 8)
        assert gateway.batches[-1].timestamp == 2001.0


async def test_replayed_gap_is_invisible_to_gateways() -> None:
    async with engine() as running:
        gateway = running.subscribe()
        running.publish(block(1))
        running.transports[0].history[1] = payload(1, block(2, 1), life=1)  # type: ignore[index]
        running.lose()
        running.publish(block(3, 2))
        await running.follows()
        await gateway.read_until(running.last)
        assert gateway.held() == held(1, 2, 3)


async def test_gap_without_replay_ends_the_stream_with_data_loss() -> None:
    async with engine() as running:
        gateway = running.subscribe()
        running.publish(block(1))
        await running.follows()
        await gateway.read_until(running.last)
        running.lose(3)
        running.publish(block(5))
        await running.follows()
        assert await gateway.end() == ("DATA_LOSS", "batches of the engine's rank 0 were lost")
        assert (await running.subscribe(FIRST).end())[0] == "OUT_OF_RANGE"
        newcomer = running.subscribe()
        (snapshot,) = await newcomer.read()
        assert (newcomer.held(), snapshot.snapshot.unknown_before) == (held(5), 1)
        running.publish(CLEAR)
        await running.follows()
        (snapshot,) = await running.subscribe().read()
        assert snapshot.snapshot.unknown_before == 0


async def test_late_bridge_counts_the_unknown_past_in_its_snapshot() -> None:
    async with engine(connected=False, recovery=Recovery.NONE) as running:
        running.transports[0].put(Connected())
        running.transports[0].put(Batch(40, payload(40, block(1))))
        await until(lambda: running.bridge.ranks[0].feed.state is FeedState.DEGRADED)
        (snapshot,) = await running.subscribe().read()
        assert snapshot.snapshot.unknown_before == 1


async def test_invalid_batch_is_a_hole() -> None:
    async with engine() as running:
        gateway = running.subscribe()
        await gateway.read()
        running.transports[0].put(Batch(0, b"\x00"))
        assert (await gateway.end())[0] == "DATA_LOSS"


async def test_slow_gateway_is_cut_off_and_the_others_are_not() -> None:
    limits = BridgeLimits(history_batches=5)
    large = ["BlockStored", [1], None, [2**31] * 60_000, 60_000]
    async with engine(limits=limits) as running:
        slow, fast = running.subscribe(), running.subscribe()
        await asyncio.gather(slow.read(), fast.read())
        for _ in range(100):  # more than the sockets and gRPC buffer
            running.publish(large)
            await running.follows()
            await fast.read_until(running.last)
        assert (await slow.end())[0] == "DATA_LOSS"
        assert fast.accounts[0].last == running.last


async def test_ranks_have_sequence_numbers_of_their_own() -> None:
    async with engine(ranks=2) as running:
        gateway = running.subscribe()
        await gateway.read(2)
        running.publish(block(1))
        running.publish(block(1), rank=1)
        running.publish(block(2, 1), rank=1)
        await running.follows()
        await gateway.read_until(running.bridge.ranks[1].history.last, rank=1)
        await gateway.read_until(running.last)
        assert (gateway.held(0), gateway.held(1)) == (held(1), held(1, 2))
        assert gateway.numbers(0)[0] == gateway.numbers(1)[0] == FIRST - 1


@pytest.mark.parametrize("service", SERVICES.values())
async def test_subscribe_method_exists_in_every_service(service: str) -> None:
    async with engine() as running:
        await running.subscribe(service=service).read()


async def test_engine_without_events_is_unimplemented_until_it_connects() -> None:
    async with engine(connected=False) as running:
        transport = running.transports[0]
        transport.put(Refused("event_buffer_max_size is 0"))
        await until(lambda: running.bridge.ranks[0].feed.state is FeedState.UNSUPPORTED)
        status, reason = await running.subscribe().end()
        assert status == "UNIMPLEMENTED"
        assert reason == "it publishes no events: event_buffer_max_size is 0"
        transport.put(Connected())
        await until(lambda: running.bridge.fault is None)
        await running.subscribe().read()


async def test_missing_engine_is_unavailable_and_unhealthy() -> None:
    async with engine(connected=False) as running:
        assert (await running.subscribe().end())[0] == "UNAVAILABLE"
        assert await health(running) == b"\x08\x02"
        running.transports[0].put(Connected())
        await until(lambda: running.bridge.fault is None)
        assert await health(running) == b"\x08\x01"


async def test_lost_engine_ends_the_stream_which_resumes_when_it_is_back() -> None:
    async with engine() as running:
        gateway = running.subscribe()
        running.publish(block(1))
        await running.follows()
        await gateway.read_until(running.last)
        running.transports[0].put(Disconnected())
        assert (await gateway.end())[0] == "UNAVAILABLE"
        running.transports[0].put(Connected())
        await until(lambda: running.bridge.fault is None)
        back = running.subscribe(running.last)
        running.publish(block(2, 1))
        await running.follows()
        await back.read_until(running.last)
        assert back.held() == held(1, 2)


async def test_health_watch_reports_changes() -> None:
    async with engine(connected=False) as running, channel_to(running) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watch.read() == b"\x08\x02"
        running.transports[0].put(Connected())
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await watch.read() == b"\x08\x01"


async def test_invalid_request_is_refused() -> None:
    async with engine() as running, channel_to(running) as channel:
        call = channel.unary_stream(f"/{SERVICES['vllm']}/SubscribeKvEvents")(b"\x08")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_stop_ends_streams_with_unavailable() -> None:
    async with engine() as running:
        gateway = running.subscribe()
        await gateway.read()
        await running.server.stop()
        assert await gateway.end() == ("UNAVAILABLE", "the bridge is stopping")


async def test_streams_over_the_limit_are_refused() -> None:
    async with engine(limits=BridgeLimits(streams=1)) as running:
        await running.subscribe().read()
        assert (await running.subscribe().end())[0] == "RESOURCE_EXHAUSTED"


async def test_broken_feed_ends_the_streams_and_not_the_bridge() -> None:
    async with engine() as running:
        gateway = running.subscribe()
        await gateway.read()
        running.transports[0].put(Batch(0, 5))  # type: ignore[arg-type]
        assert (await gateway.end())[0] in ("DATA_LOSS", "UNAVAILABLE")
        assert not running.bridge.is_stopped
        assert (await running.subscribe().end())[0] == "UNAVAILABLE"
