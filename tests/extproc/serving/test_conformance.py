"""What Envoy and probes may expect of the server, over each transport."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import generate_latest

from extproc.config.owned_headers import owned_headers
from extproc.pb.kvsteer_ext_proc_pb2 import (
    HttpHeaders,
    HttpTrailers,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)
from extproc.pb.kvsteer_health_pb2 import HealthCheckResponse
from extproc.tokenizing.prompt_tokens import TOKENIZER_THREADS
from tests.extproc.messages import body, head
from tests.extproc.serving.running import PROCESS, PROMPT, WORKER, Running, listen_at
from tests.waiting import until

DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED

LONG_PROMPT = b'{"model": "m", "prompt": [%b]}' % b",".join([b"1"] * 50_000)


@pytest.fixture(params=["tcp", "unix"])
async def running(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Running]:
    one = Running(listen_at(request.param, tmp_path))
    await one.server.start()
    yield one
    await one.stop()


async def placed(call: grpc.aio.StreamStreamCall, prompt: bytes = PROMPT) -> ProcessingResponse:
    """Sends a request; returns the answer with its pick."""
    await call.write(head("/v1/completions"))
    assert (await call.read()).WhichOneof("response") == "request_headers"
    await call.write(body(prompt))
    answer: ProcessingResponse = await call.read()
    return answer


def pick_of(answer: ProcessingResponse) -> str:
    part = getattr(answer, str(answer.WhichOneof("response")))
    value: bytes = part.response.header_mutation.set_headers[0].header.raw_value
    return value.decode()


async def status_of(call: grpc.aio.StreamStreamCall) -> grpc.StatusCode:
    """Returns the status with which the server ends a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code()


async def test_request_holds_load_from_its_pick_until_the_stream_ends(
    running: Running,
) -> None:
    call = running.process()
    answer = await placed(call)
    assert (answer.WhichOneof("response"), pick_of(answer)) == ("request_body", WORKER)
    assert running.in_flight == 1
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert running.in_flight == 0


@pytest.mark.parametrize(
    "message",
    [head("/v1/rerank"), head("/v1/completions", end_of_stream=True)],
    ids=["not keyed", "no body"],
)
async def test_request_without_a_prompt_is_placed_on_its_headers(
    running: Running, message: ProcessingRequest
) -> None:
    call = running.process()
    await call.write(message)
    answer = await call.read()
    assert (answer.WhichOneof("response"), pick_of(answer)) == ("request_headers", WORKER)


async def test_request_that_calls_no_model_gets_no_header_and_no_load(running: Running) -> None:
    call = running.process()
    await call.write(head("/metrics"))
    mutation = (await call.read()).request_headers.response.header_mutation
    assert not mutation.set_headers
    assert set(mutation.remove_headers) == set(owned_headers(running.service.config))
    assert running.in_flight == 0


@pytest.mark.parametrize(
    "content", [b"", b'{"model": "m", "prompt": "' + b"x" * 5_000_000 + b'"}'], ids=["none", "5 MB"]
)
async def test_body_of_any_size_is_placed(running: Running, content: bytes) -> None:
    call = running.process()
    await call.write(head("/v1/completions"))
    await call.read()
    await call.write(body(content))
    assert pick_of(await call.read()) == WORKER


async def test_response_passes_unchanged(running: Running) -> None:
    call = running.process()
    await placed(call)
    await call.write(ProcessingRequest(response_headers=HttpHeaders()))
    assert (await call.read()).WhichOneof("response") == "response_headers"
    await call.write(ProcessingRequest(response_trailers=HttpTrailers()))
    assert (await call.read()).WhichOneof("response") == "response_trailers"


async def test_body_of_many_messages_is_placed_whole(running: Running) -> None:
    call = running.process()
    await call.write(head("/v1/completions", mode=DUPLEX))
    for number, part in enumerate((PROMPT[:10], PROMPT[10:20], PROMPT[20:])):
        await call.write(body(part, end_of_stream=number == 2))
    answer = await call.read()
    assert (answer.WhichOneof("response"), pick_of(answer)) == ("request_headers", WORKER)
    echoed = (await call.read()).request_body.response.body_mutation.streamed_response
    assert echoed.body == PROMPT


async def test_large_body_is_echoed_whole(running: Running) -> None:
    content, parts = bytes(range(256)) * 8192, 32
    size = len(content) // parts
    call = running.process()
    await call.write(head("/metrics", mode=DUPLEX))
    await call.read()
    echoed = b""
    for at in range(parts):
        await call.write(body(content[at * size : (at + 1) * size], end_of_stream=at == parts - 1))
    while len(echoed) < len(content):
        mutation = (await call.read()).request_body.response.body_mutation
        echoed += mutation.streamed_response.body
    assert echoed == content


async def test_cancelled_stream_releases_its_load_once(running: Running) -> None:
    other = running.process()
    await placed(other)
    call = running.process()
    await placed(call)
    assert running.in_flight == 2
    call.cancel()
    await until(lambda: running.in_flight == 1)
    await other.done_writing()
    assert await other.read() is grpc.aio.EOF
    assert running.in_flight == 0


async def test_stream_that_ends_during_tokenizing_releases_its_thread_and_memory(
    running: Running,
) -> None:
    tokens, may_end = running.router.tokens, threading.Event()
    tokens.deadline_seconds = 60.0
    busy = [
        asyncio.create_task(tokens.run_in_thread(may_end.wait, 1)) for _ in range(TOKENIZER_THREADS)
    ]
    call = running.process()
    await call.write(head("/v1/completions"))
    await call.read()
    await call.write(body(LONG_PROMPT))
    await until(lambda: tokens.waiting == TOKENIZER_THREADS + 1)
    call.cancel()
    await until(lambda: tokens.waiting == TOKENIZER_THREADS)
    may_end.set()
    await asyncio.gather(*busy)
    await until(lambda: running.metrics.open_streams == 0)
    assert running.in_flight == 0
    assert pick_of(await placed(running.process(), LONG_PROMPT)) == WORKER
    assert running.in_flight == 1


async def test_lost_connection_releases_all_loads(running: Running) -> None:
    calls = [running.process() for _ in range(5)]
    for call in calls:
        await placed(call)
    assert running.in_flight == 5
    await running.channel.close()
    await until(lambda: running.in_flight == 0)


async def test_stream_may_end_before_its_first_message(running: Running) -> None:
    call = running.process()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_message_out_of_order_is_an_invalid_argument(running: Running) -> None:
    call = running.process()
    await call.write(body(PROMPT))
    assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT
    assert "body" in (await call.details())
    assert b"kvsteer_protocol_errors_total 1.0" in generate_latest(running.metrics)


async def test_internal_fault_ends_the_stream_without_its_text(running: Running) -> None:
    call = running.process()
    await call.write(head())
    await call.read()

    running.router.fails, running.router.fault = "route", ValueError("secret")
    await call.write(body(PROMPT))
    assert await status_of(call) is grpc.StatusCode.INTERNAL
    gauge = b"kvsteer_open_streams 0.0"
    await until(lambda: gauge in generate_latest(running.metrics))
    assert "secret" not in await call.details()


async def test_message_above_the_limit_is_refused(running: Running) -> None:
    call = running.process()
    await call.write(head())
    await call.read()
    await call.write(body(bytes(34 * 1024 * 1024)))
    assert await status_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_undecodable_message_ends_the_stream(running: Running) -> None:
    call = running.channel.stream_stream(PROCESS)()
    await call.write(b"\xff\xff\xff")
    assert await status_of(call) is grpc.StatusCode.INTERNAL


async def test_unknown_method_is_unimplemented(running: Running) -> None:
    call = running.channel.stream_stream("/some.Service/Method")()
    assert await status_of(call) is grpc.StatusCode.UNIMPLEMENTED


async def test_streams_run_in_parallel(running: Running) -> None:
    calls = [running.process() for _ in range(300)]
    answers = await asyncio.gather(*(placed(call) for call in calls))
    assert {pick_of(answer) for answer in answers} == {WORKER}
    assert running.in_flight == 300
    for call in calls:
        await call.done_writing()
    assert {await call.read() for call in calls} == {grpc.aio.EOF}
    assert running.in_flight == 0


async def test_stopping_server_ends_open_streams_and_refuses_new_ones(
    running: Running,
) -> None:
    call = running.process()
    await placed(call)
    stopping = asyncio.create_task(running.server.stop())
    await asyncio.sleep(0)
    late = running.process()
    assert await status_of(late) is grpc.StatusCode.UNAVAILABLE
    await call.write(ProcessingRequest(response_headers=HttpHeaders()))
    assert (await call.read()).WhichOneof("response") == "response_headers"
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await stopping
    assert running.in_flight == 0


async def test_streams_that_outlast_the_drain_are_ended(tmp_path: Path) -> None:
    one = Running(listen_at("tcp", tmp_path), ", drain_ms: 100")
    await one.server.start()
    call = one.process()
    await placed(call)
    await one.server.stop()
    assert await status_of(call) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    await until(lambda: one.in_flight == 0)
    await one.stop()


async def test_stopping_server_reports_not_ready_and_does_not_wait_for_watches(
    running: Running,
) -> None:
    watches = [running.watch("readiness") for _ in range(8)]
    for watch in watches:
        assert (await watch.read()).status == HealthCheckResponse.SERVING
    before = time.monotonic()
    reads = [asyncio.ensure_future(watch.read()) for watch in watches]
    await running.server.stop()
    # grpc's client drops a message that it finds together with the end of its call: not all of them
    read = await asyncio.gather(*reads, return_exceptions=True)
    last = {one.status for one in read if isinstance(one, HealthCheckResponse)}
    assert last == {HealthCheckResponse.NOT_SERVING}
    for watch in watches:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - before < running.service.config.extproc.drain_ms / 1000


async def test_health_follows_readiness(running: Running) -> None:
    for service in ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        running.ready = True
        assert await running.health(service) == HealthCheckResponse.SERVING
        running.ready = False
        assert await running.health(service) == HealthCheckResponse.NOT_SERVING
    assert await running.health("liveness") == HealthCheckResponse.SERVING


async def test_health_of_an_unknown_service_is_not_found(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.health("nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_watch_follows_readiness(running: Running) -> None:
    watch = running.watch()
    assert (await watch.read()).status == HealthCheckResponse.SERVING
    running.ready = False
    assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
    watch.cancel()


async def test_health_watch_of_an_unknown_service_reports_it_unknown(running: Running) -> None:
    watch = running.watch("nobody")
    assert (await watch.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
