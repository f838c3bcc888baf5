"""A router's process from its start to its end."""

import asyncio
import dataclasses
import os
import signal
import stat
from pathlib import Path

import aiohttp
import grpc
import pytest

from extproc.pb.kvsteer_ext_proc_pb2 import HttpHeaders, ProcessingRequest
from kvtools.simulator.server import running as simulated
from kvtools.simulator.settings import TINY_MODEL, Settings
from tests.extproc.router_process import (
    AS_FIRST_PROCESS,
    first_process,
    needs_namespaces,
    router,
)
from tests.extproc.serving.identities import Identities
from tests.extproc.serving.running import listen_at
from tests.ports import free_port
from tests.waiting import until


@pytest.mark.slow
async def test_open_streams_end_before_the_router(tmp_path: Path) -> None:
    listen = listen_at("tcp", tmp_path)
    async with router(tmp_path, listen, drain_ms=60_000) as one:
        call = await one.placed()
        one.process.send_signal(signal.SIGTERM)
        await until(lambda: one.answers(503), "it says that it is not ready")
        assert (await one.readiness_words()).startswith("stopping: ")
        late = grpc.aio.insecure_channel(listen, [("grpc.use_local_subchannel_pool", 1)])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late.unary_unary("/grpc.health.v1.Health/Check")(b"")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await late.close()
        await call.write(ProcessingRequest(response_headers=HttpHeaders()))
        assert (await call.read()).WhichOneof("response") == "response_headers"
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        assert await asyncio.wait_for(one.process.wait(), 30) == 0


@pytest.mark.slow
async def test_drain_ms_bounds_the_wait_for_open_streams(tmp_path: Path) -> None:
    async with router(tmp_path, listen_at("tcp", tmp_path), drain_ms=500) as one:
        call = await one.placed()
        one.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(one.process.wait(), 30) == 0
        assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@pytest.mark.slow
async def test_router_without_open_streams_stops_at_once(tmp_path: Path) -> None:
    async with router(tmp_path, listen_at("tcp", tmp_path), drain_ms=60_000) as one:
        call = await one.placed()
        await call.done_writing()
        await call.code()
        one.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(one.process.wait(), 30) == 0


@pytest.mark.slow
async def test_leaving_router_is_unready_first_and_accepts_streams_for_a_while(
    tmp_path: Path,
) -> None:
    listen = listen_at("tcp", tmp_path)
    async with router(tmp_path, listen, leave_ms=10_000, drain_ms=60_000) as one:
        one.process.send_signal(signal.SIGTERM)
        await until(lambda: one.answers(503), "it says that it is not ready")
        health = one.channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await health(b"") == b"\x08\x02"  # NOT_SERVING
        call = await one.placed()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        assert await asyncio.wait_for(one.process.wait(), 30) == 0


@pytest.mark.slow
async def test_second_signal_ends_the_router_at_once(tmp_path: Path) -> None:
    async with router(tmp_path, listen_at("tcp", tmp_path), drain_ms=100_000) as one:
        await one.placed()
        one.process.send_signal(signal.SIGTERM)
        await until(lambda: one.answers(503), "it is stopping")
        one.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(one.process.wait(), 30) == -signal.SIGTERM


@needs_namespaces
@pytest.mark.slow
async def test_second_signal_ends_the_first_process_of_a_container(tmp_path: Path) -> None:
    listen = listen_at("tcp", tmp_path)
    async with router(tmp_path, listen, before=AS_FIRST_PROCESS, drain_ms=100_000) as one:
        await one.placed()
        inside = first_process(one.process.pid)
        os.kill(inside, signal.SIGTERM)
        await until(lambda: one.answers(503), "it is stopping")
        os.kill(inside, signal.SIGTERM)
        assert await asyncio.wait_for(one.process.wait(), 30) == 128 + signal.SIGTERM


@pytest.mark.parametrize("mode", ["0600", "0666"])
@pytest.mark.slow
async def test_socket_has_its_rights_and_is_removed_with_the_router(
    mode: str, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    async with router(tmp_path, f"unix:{path}", socket_mode=mode) as one:
        assert stat.S_IMODE(path.stat().st_mode) == int(mode, 8)
        call = await one.placed()
        await call.done_writing()
        await call.code()
        one.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(one.process.wait(), 30) == 0
        assert not path.exists()


@pytest.mark.slow
async def test_hangup_rereads_the_tls_files(tmp_path: Path) -> None:
    tls = dataclasses.asdict(Identities(tmp_path).tls())
    async with router(tmp_path, listen_at("tcp", tmp_path), tls=tls) as one:

        async def is_read() -> bool:
            one.process.send_signal(signal.SIGHUP)  # a signal before it serves is ignored
            return "TLS files reloaded" in one.log.read_text()

        await until(is_read, "the files are read")
        assert await one.answers(200)


@pytest.mark.slow
async def test_hangup_names_keys_that_need_a_restart(tmp_path: Path) -> None:
    async with router(tmp_path, listen_at("tcp", tmp_path)) as one:
        file = tmp_path / "kvsteer.yaml"
        text = file.read_text()

        async def says(words: str, after: str = "") -> None:
            file.write_text(text + after)
            one.process.send_signal(signal.SIGHUP)

            async def is_said() -> bool:
                return words in one.log.read_text()

            await until(is_said, words)

        await says("configuration read again: nothing changed")
        changed = "\nevents: {enabled: false}\nlog: {level: error}\npolicy: {name: random}\n"
        await says("these need a restart: log.level, policy.name\n", changed)
        assert "events disabled: requests are routed by load and by earlier" in one.log.read_text()
        await says("not reloaded: ", "\nlog: {level: loud}\n")


@pytest.mark.parametrize("deadline_ms", [0, 600_000])
@pytest.mark.slow
async def test_unreachable_worker_delays_readiness_for_a_bounded_time(
    deadline_ms: int, tmp_path: Path
) -> None:
    away = {"endpoint": "127.0.0.1:1", "events": {"zmq": f"tcp://127.0.0.1:{free_port()}"}}
    changes = {"workers": [away], "events": {"ready_deadline_ms": deadline_ms}}
    expected = 503 if deadline_ms else 200
    listen = listen_at("tcp", tmp_path)
    words = "replays are still running\n" if deadline_ms else "ready\n"
    async with router(tmp_path, listen, sections=changes, status=expected) as one:

        async def says_it() -> bool:
            said = (await one.readiness_words()).splitlines(keepends=True)
            return [line for line in said if not line.startswith("note: ")] == [words]

        await until(says_it, "it has started")  # until then it is not ready for that reason
        assert await one.ready() == expected


async def test_router_serves_and_reports_a_model_whose_tokens_differ(
    tmp_path: Path,
) -> None:
    template = tmp_path / "other.jinja"
    template.write_text((TINY_MODEL / "chat_template.jinja").read_text() + "x")
    admin = f"127.0.0.1:{free_port()}"
    async with simulated(Settings(chat_template=template)) as worker:
        sections = {
            "admin": {"listen": admin},
            "models": [{"name": "tiny", "tokenizer": str(TINY_MODEL)}],
            "workers": [{"endpoint": worker.endpoint}],
        }
        async with router(tmp_path, listen_at("tcp", tmp_path), sections=sections) as one:

            async def is_said() -> bool:
                said = "ready\nmodel tiny: its tokens are found to differ by worker"
                return (await one.readiness_words()).startswith(said)

            await until(is_said, "the difference is told")
            assert await one.ready() == 200
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{admin}/models") as answer:
                    (shown,) = await answer.json()
                async with session.get(f"http://{one.metrics}/metrics") as answer:
                    metrics = await answer.text()
            assert (shown["state"], shown["request"]) == ("refuted", "a conversation")
            assert 'kvsteer_model_verified{model="tiny",result="refuted"} 1.0' in metrics
            assert one.log.read_text().count("its tokens differ from those of worker") == 1
