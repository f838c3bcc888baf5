"""Which front end a worker has, by what it refuses, over real sockets."""

import asyncio

import pytest

from extproc.base.engine import PYTHON, RUST, SGLANG, TRTLLM, VLLM, Engine, Release
from extproc.fleet.asking.polling import Client
from extproc.fleet.identity.front_ends import FrontEndSilentError, front_end_of, names_rust
from extproc.fleet.identity.identifying import ask_engine
from kvstate.events import Loss
from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings
from tests.extproc.fleet.answering import Raw, Status, worker
from tests.extproc.fleet.identity.test_identifying import followed
from tests.waiting import until

REFUSAL = (
    b'{"error":{"message":"POST /v1/messages is not supported by the Rust frontend yet. Set'
    b' VLLM_USE_RUST_FRONTEND=0 to use the Python frontend.","type":"NotImplementedError",'
    b'"param":null,"code":501}}'
)


async def found(endpoint: str, engine: str) -> str:
    client = Client()
    try:
        return await front_end_of(client, endpoint, engine)
    finally:
        await client.close()


@pytest.mark.parametrize(("is_rust", "front_end"), [(True, RUST), (False, PYTHON)])
@pytest.mark.parametrize(("dialect", "engine"), [("vllm-0.32", VLLM), ("sglang-0.5.22", SGLANG)])
async def test_front_end_is_found_by_what_a_worker_lacks(
    dialect: str, engine: str, is_rust: bool, front_end: str
) -> None:
    async with running(Settings(dialect=dialect, rust_front_end=is_rust)) as simulated:
        assert await found(simulated.endpoint, engine) == front_end


async def test_tensorrt_llm_has_one_front_end() -> None:
    assert await found("127.0.0.1:1", TRTLLM) == PYTHON


async def serving(answers: dict[tuple[str, str], tuple[int, bytes]]) -> asyncio.Server:
    """Serves answers by method and path, others with 404."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        status, body = answers.get((method, path), (404, b""))
        length = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(length.encode() + body)
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


MESSAGES, ELASTIC = ("POST", "/v1/messages"), ("POST", "/is_scaling_elastic_ep")


@pytest.mark.parametrize(
    ("answers", "front_end"),
    [
        ({MESSAGES: (501, REFUSAL)}, RUST),
        ({MESSAGES: (501, b"no such method")}, PYTHON),
        ({MESSAGES: (501, b'{"error": {"message": "not implemented"}}')}, PYTHON),
        ({MESSAGES: (400, REFUSAL)}, PYTHON),
        ({}, PYTHON),
        ({MESSAGES: (401, b""), ELASTIC: (501, REFUSAL)}, RUST),
        ({MESSAGES: (403, b""), ELASTIC: (200, b"{}")}, PYTHON),
        ({MESSAGES: (401, b"")}, PYTHON),
    ],
)
async def test_vllm_is_behind_rust_if_a_refusal_says_so(
    answers: dict[tuple[str, str], tuple[int, bytes]], front_end: str
) -> None:
    async with await serving(answers) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await found(endpoint, VLLM) == front_end


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@pytest.mark.parametrize("engine", [VLLM, SGLANG])
async def test_passing_failure_shows_no_front_end(engine: str, status: int) -> None:
    failing = {"v1/messages": Status(status), "get_server_info": Status(status)}
    async with worker(**failing) as endpoint:
        with pytest.raises(FrontEndSilentError, match=f"status {status}"):
            await found(endpoint, engine)


@pytest.mark.parametrize("refusal", [b"", b"[]", b'{"error": 7}', b"\xff", b"[" * 3_000])
def test_what_is_no_refusal_names_nothing(refusal: bytes) -> None:
    assert not names_rust(refusal)
    assert names_rust(REFUSAL)


async def test_failing_worker_keeps_its_front_end_and_a_restarted_one_gets_its_new_one() -> None:
    async with running(Settings(rust_front_end=True)) as first:
        endpoint = first.endpoint
        client = Client()
        told = await ask_engine(client, endpoint)
        await client.close()
        assert told.engine == Engine(VLLM, Release(0, 32), RUST)
        assert str(told.engine) == "vllm 0.32.0, Rust front end"
    async with followed(endpoint) as (workers, one):
        async with running(Settings(listen=endpoint, rust_front_end=True)):
            await until(lambda: one.engine == told.engine, "its front end is known")
        asked_at = one.engine_questions.at
        workers.note_emptied(one.name, Loss.RESTARTED)
        await until(lambda: one.engine_questions.at > asked_at + 0.05, "it is asked in vain")
        assert one.engine == told.engine
        async with running(Settings(listen=endpoint)):
            workers.note_emptied(one.name, Loss.RESTARTED)
            await until(lambda: one.engine == Engine(VLLM, Release(0, 32)), "it is asked again")
            (status,) = workers.states.statuses()
            assert status["engine"]["frontend"] == PYTHON


async def test_engine_stays_unknown_while_its_front_end_fails() -> None:
    answers = {
        "v1/models": {"data": [{"id": "tiny", "owned_by": "vllm"}]},
        "version": {"version": "0.33.0"},
        "v1/messages": Status(503),
        "metrics": Raw(""),
    }
    async with worker(**answers) as endpoint, followed(endpoint) as (_, one):
        why = "it does not answer: /v1/messages: status 503"
        await until(lambda: one.identity.reason == why, "it is asked")
        assert one.engine is None
