"""A router that waits for minutes asks the proxy for more time first; over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from extproc.features.feature import AskForTime
from extproc.http2.limits import Limits
from extproc.http2.messages import LONG_BYTES
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingMode, ProcessingResponse
from extproc.requests.request import RoutingRequest
from extproc.serving.lean_server import LeanServer
from extproc.serving.router import Routed, no_more_time
from tests.extproc.messages import body, head, response_head, trailers
from tests.extproc.serving.running import PROMPT, WORKER, Running
from tests.waiting import until

DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
LIMITS = Limits(stall_ticks=2, preface_ticks=2)
LONG_PROMPT = PROMPT[:-1] + b', "x": "' + bytes(2 * LONG_BYTES).replace(b"\0", b"a") + b'"}'
SECONDS = 90.5


class Holding:
    """Has a router ask twice for more time, and wait until the gate opens.

    before: opens when it may ask. granted: what it was answered. cancelled: waits that were.
    """

    def __init__(self, running: Running) -> None:
        self.before, self.gate = asyncio.Event(), asyncio.Event()
        self.before.set()
        self.granted: list[bool] = []
        self.begun = self.cancelled = 0
        self._route = running.router.route
        running.router.route = self.route  # type: ignore[method-assign]

    async def route(
        self,
        request: RoutingRequest,
        traceparent: str = "",
        ask_for_time: AskForTime = no_more_time,
    ) -> Routed:
        self.begun += 1
        try:
            if not self.before.is_set():
                await asyncio.sleep(0)
                await self.before.wait()
            self.granted += [ask_for_time(SECONDS), ask_for_time(SECONDS)]
            await asyncio.sleep(0)
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await self._route(request, traceparent)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    one = Running(f"unix:{tmp_path}/socket", ", drain_ms: 50")
    one.server = LeanServer(one.service, lambda: one.ready, LIMITS)
    await one.server.start()
    yield one
    await one.stop()


@pytest.fixture
def holding(running: Running) -> Holding:
    return Holding(running)


async def asked(
    running: Running, content: bytes = PROMPT, mode: int | None = None
) -> grpc.aio.StreamStreamCall:
    """A stream whose request the router decides on."""
    call = running.process()
    await call.write(head("/v1/completions", mode=mode))
    if mode != DUPLEX:
        await call.read()
    await call.write(body(content))
    return call


async def held(running: Running, content: bytes = PROMPT) -> grpc.aio.StreamStreamCall:
    """A stream whose request is held, as its proxy was told."""
    call = await asked(running, content)
    assert seconds_of(await call.read()) == SECONDS
    return call


def seconds_of(answer: ProcessingResponse) -> float:
    """The time that a message asks for, which says nothing else."""
    assert answer.WhichOneof("response") is None
    return answer.override_message_timeout.ToTimedelta().total_seconds()


async def assert_all_is_released(running: Running, holding: Holding) -> None:
    await until(lambda: holding.cancelled == holding.begun, "the wait is cancelled")
    await until(lambda: running.metrics.open_streams == 0)
    assert running.in_flight == 0


@pytest.mark.parametrize("content", [PROMPT, LONG_PROMPT], ids=["short", "long"])
@pytest.mark.parametrize("waits_before", [False, True])
async def test_proxy_is_asked_for_more_time_at_once_and_gets_the_pick_later(
    running: Running, holding: Holding, content: bytes, *, waits_before: bool
) -> None:
    if waits_before:
        holding.before.clear()
        asyncio.get_running_loop().call_later(0.02, holding.before.set)
    call = await held(running, content)
    assert holding.granted == [True, False]
    holding.gate.set()
    answer = await call.read()
    assert answer.WhichOneof("response") == "request_body"
    assert running.in_flight == 1
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert running.in_flight == holding.cancelled == 0


async def test_many_are_held_at_once_and_let_go_together(
    running: Running, holding: Holding
) -> None:
    calls = await asyncio.gather(*(held(running) for _ in range(50)))
    holding.gate.set()
    answers = await asyncio.gather(*(call.read() for call in calls))
    assert {one.WhichOneof("response") for one in answers} == {"request_body"}
    assert running.in_flight == 50


async def test_endpoint_picker_protocol_waits_without_being_asked(
    running: Running, holding: Holding
) -> None:
    call = await asked(running, mode=DUPLEX)
    await until(lambda: holding.granted == [True, False])
    holding.gate.set()
    assert (await call.read()).WhichOneof("response") == "request_headers"


async def test_wait_is_cancelled_when_a_gateway_gives_the_request_up(
    running: Running, holding: Holding
) -> None:
    call = await asked(running, mode=DUPLEX)
    await until(lambda: holding.granted == [True, False])
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await assert_all_is_released(running, holding)


@pytest.mark.parametrize("content", [PROMPT, LONG_PROMPT], ids=["short", "long"])
@pytest.mark.parametrize("how", ["reset", "half closed", "connection lost"])
async def test_wait_is_cancelled_when_the_proxy_gives_the_request_up(
    running: Running, holding: Holding, content: bytes, how: str
) -> None:
    call = await held(running, content)
    if how == "half closed":  # what Envoy does if its client goes
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK
    elif how == "reset":
        call.cancel()
    else:
        await running.channel.close()
    await assert_all_is_released(running, holding)


@pytest.mark.parametrize("served", ["", WORKER], ids=["plain", "with metadata"])
async def test_wait_is_cancelled_when_the_proxy_answers_the_request_itself(
    running: Running, holding: Holding, served: str
) -> None:
    call = await held(running)
    message = response_head(408)
    if served:  # which the session leaves to protobuf
        fields = message.metadata_context.filter_metadata["envoy.lb"].fields
        fields["x-gateway-destination-endpoint-served"].string_value = served
    await call.write(message)
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK
    await assert_all_is_released(running, holding)


async def test_wait_is_cancelled_when_the_server_stops(running: Running, holding: Holding) -> None:
    call = await held(running)
    await running.server.stop()
    await assert_all_is_released(running, holding)
    assert await call.code() == grpc.StatusCode.UNAVAILABLE


async def test_request_that_is_over_gets_no_more_time(running: Running, holding: Holding) -> None:
    holding.before.clear()
    call = await asked(running)
    await until(lambda: holding.begun == 1)
    await call.done_writing()
    await running.health("")  # on the same connection: the end has come
    holding.before.set()
    holding.gate.set()
    assert (await call.read()).WhichOneof("response") == "request_body"
    assert await call.read() is grpc.aio.EOF
    assert holding.granted == [False, False]
    assert running.in_flight == 0


async def test_other_messages_are_answered_after_the_pick(
    running: Running, holding: Holding
) -> None:
    call = await held(running)
    await call.write(trailers())
    holding.gate.set()
    answers = [(await call.read()).WhichOneof("response") for _ in range(2)]
    assert answers == ["request_body", "request_trailers"]


async def test_held_stream_outlives_what_bounds_silent_peers(
    running: Running, holding: Holding
) -> None:
    call = await held(running)
    (connection,) = running.server.connections
    for _ in range(10 * LIMITS.stall_ticks):
        connection.tick()
    holding.gate.set()
    assert (await call.read()).WhichOneof("response") == "request_body"
