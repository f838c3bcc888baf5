import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.demo import Part, Ports, keep_running, ready, run, running, started
from extproc.demo_workload import Row, compare, report
from extproc.errors import StartError
from tests.ports import free_port

LIVE = [{"endpoint": "a", "feeds": [{"state": "live", "reason": ""}]}]
GOOD = [Row(0, 0, "a", None, 0, 0), Row(0, 1, "a", "a", 16, 16), Row(1, 0, "b", None, 0, 0)]


async def test_the_demo_passes_its_own_check() -> None:
    command = [sys.executable, "-m", "extproc", "demo", "--check", "--workers", "2"]
    command += ["--port", str(free_port())]
    demo = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told, _ = await demo.communicate()
    assert demo.returncode == 0, told.decode()
    assert told.decode().splitlines()[-1].endswith("predicted: ok")


async def test_round_robin_is_compared_with_kvsteer() -> None:
    async with running(3, free_port()) as place:
        told = await compare(place.envoy, place.admin, place.replays, "tiny")
        shares = dict(re.findall(r"^(round robin|KVSteer) .* (\d+)%$", told, re.MULTILINE))
        assert int(shares["KVSteer"]) > int(shares["round robin"]), told
        gone = await compare(f"http://127.0.0.1:{free_port()}", place.admin, place.replays, "tiny")
        assert gone.startswith("Round robin and KVSteer could not be compared: ")


@pytest.mark.slow
async def test_demos_that_start_at_once_do_not_meet() -> None:
    demos = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "extproc", "demo", "--check", "--port", str(free_port())),
            stdout=PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        for _ in range(3)
    ]
    told = await asyncio.gather(*(demo.communicate() for demo in demos))
    assert [demo.returncode for demo in demos] == [0, 0, 0], told


@pytest.mark.parametrize(
    ("rows", "workers", "fault"),
    [
        ([*GOOD, Row(0, 2, "b", "a", 0, 0)], LIVE, "0.3: its prefix is on a"),
        ([*GOOD, Row(0, 2, "a", "a", 16, 32)], LIVE, "0.3: prediction differs"),
        (GOOD[:2], LIVE, "only 1 worker was used"),
        ([GOOD[0], GOOD[2]], LIVE, "nothing was predicted to be cached"),
        (
            GOOD,
            [{"endpoint": "a", "feeds": [{"state": "stale", "reason": "gone"}]}],
            "feed of a is stale: gone",
        ),
    ],
)
def test_the_judge_finds_each_fault(
    rows: list[Row], workers: list[dict[str, Any]], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not report(rows, workers)
    assert f"FAULT {fault}" in capsys.readouterr().out


def test_the_judge_is_content_with_what_is_right() -> None:
    assert report(GOOD, LIVE)


@pytest.mark.parametrize(
    ("workers", "check", "fault"),
    [(0, False, "at least 1"), (1, True, "at least 2"), (3000, False, "at most 64")],
)
def test_too_few_and_too_many_workers_are_refused(workers: int, fault: str, *, check: bool) -> None:
    with pytest.raises(StartError, match=f"--workers must be {fault}"):
        run(workers=workers, port=free_port(), check=check)


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(StartError, match="--port must be 1 to 65535"):
        run(workers=1, port=port, check=False)


@pytest.mark.parametrize("options", [[], ["--check"]])
@pytest.mark.slow
async def test_it_can_be_stopped_while_it_starts(options: Sequence[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "extproc", "demo", "--port", str(free_port()), *options]
    demo = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "TMPDIR": f"{tmp_path}"}
    )
    while not _left_in(tmp_path):
        await asyncio.sleep(0.02)
        assert demo.returncode is None
    demo.send_signal(signal.SIGTERM)
    assert await demo.wait() == 130
    assert not _left_in(tmp_path)


def _left_in(folder: Path) -> bool:
    """Whether a demo in this folder has begun, and not cleaned up yet."""
    return bool(list(folder.glob("kvsteer-demo-*")))


def test_a_port_on_which_another_envoy_listens_is_refused() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            run(workers=1, port=port, check=False)


async def test_a_part_that_dies_as_it_starts_is_told_with_its_last_words() -> None:
    part = Part("envoy", [sys.executable, "-c", "exit('no room')"], decisions=False)
    async with started(part):
        with pytest.raises(StartError, match="demo: envoy ended with 1"):
            await ready([f"http://127.0.0.1:{free_port()}/"], [part])
        assert await part.ended() == "envoy ended with 1\n  no room"


async def test_what_is_not_ready_in_time_is_told_with_what_the_parts_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.demo.READY_TIMEOUT_SECONDS", 1.0)
    waits = "import time; print('no feed is live', flush=True); time.sleep(1000)"
    router = Part("router", [sys.executable, "-c", waits], decisions=False)
    async with started(router):
        while not router.said():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
        with pytest.raises(StartError, match="last output of router:\n  no feed is live"):
            await ready([f"http://127.0.0.1:{free_port()}/readyz"], [router])


async def test_a_part_that_has_ended_is_told_though_another_answers_in_its_place() -> None:
    async def says_ready(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/ready", says_ready)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()
    envoy = Part("envoy", [sys.executable, "-c", "exit('cannot bind')"], decisions=False)
    async with started(envoy):
        await envoy.ended()
        with pytest.raises(StartError, match="envoy ended with 1\n  cannot bind"):
            await ready([f"http://127.0.0.1:{port}/ready"], [envoy])
    await runner.cleanup()


async def test_demos_that_start_at_once_take_different_ports() -> None:
    asks = """
import sys
from extproc.demo import Ports, configuration
with Ports() as ports:
    print(configuration(2, int(sys.argv[1]), ports, "/a") + "---", flush=True)
    sys.stdin.read()
"""
    demos = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", asks, str(free_port())), stdin=PIPE, stdout=PIPE
        )
        for _ in range(3)
    ]
    ports: list[str] = []
    for demo in demos:
        assert demo.stdout is not None
        ports += re.findall(r"127\.0\.0\.1:(\d+)", (await demo.stdout.readuntil(b"---")).decode())
    for demo in demos:
        await demo.communicate(b"")
    assert len(ports) == len(set(ports)) == 30


def test_a_demo_takes_no_port_twice() -> None:
    with Ports() as ports:
        first = ports.any()
        assert ports.free(first) != first
        with pytest.raises(StartError, match=f"127.0.0.1:{first}: this demo has it"):
            ports.take(first)


def test_a_port_that_another_demo_has_is_refused() -> None:
    port = free_port()
    holds = (
        "import sys; from extproc.demo import Ports\n"
        f"with Ports() as ports: ports.take({port}); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with Ports() as ports:
            with pytest.raises(
                StartError,
                match=f"127.0.0.1:{port}: another demo has it; choose another with --port",
            ):
                ports.take(port)
            other.communicate()
            ports.take(port)


async def test_a_worker_that_ends_is_told_and_started_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    once = f"import os; os.mkdir('{tmp_path}/' + str(os.getpid())); exit('killed')"
    worker = Part("worker a", [sys.executable, "-c", once], decisions=False, comes_back=True)
    async with started(worker):
        keeping = asyncio.create_task(keep_running([worker], again_seconds=0.01))
        while _count_in(tmp_path) < 3:
            await asyncio.sleep(0.02)
            assert not keeping.done()
        keeping.cancel()
        await asyncio.wait([keeping])
    told = capsys.readouterr().out
    assert "worker a ended with 1\n  killed\n  it restarts in 0.01 s\n" in told
    assert "worker a has restarted" in told


@pytest.mark.slow
async def test_the_demo_goes_on_when_the_router_is_killed_as_it_says(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "extproc", "demo", "--workers", "1", "--port", str(port)]
    demo = await asyncio.create_subprocess_exec(
        *command, stdout=PIPE, env={**os.environ, "TMPDIR": f"{tmp_path}"}
    )
    try:
        assert demo.stdout is not None
        said = (await demo.stdout.readuntil(b"both restart after")).decode()
        killing = re.findall(r"kill -9 (\d+)", said)[-1]
        processes = dict(re.findall(r"^ +(\d+)  (\S+)", said, re.MULTILINE))
        assert list(processes.values()) == ["worker", "router", "envoy"]
        assert processes[killing] == "router"
        os.kill(int(killing), signal.SIGKILL)
        await demo.stdout.readuntil(b"router ended with -9")
        async with aiohttp.ClientSession() as session:
            request = {"model": "tiny", "max_tokens": 1, "prompt": "hello"}
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with session.post(url, json=request) as response:
                assert response.status == 200
        assert demo.returncode is None
    finally:
        demo.send_signal(signal.SIGTERM)
        await demo.communicate()


async def test_the_demo_ends_with_envoy() -> None:
    forever = Part("worker a", ["sleep", "1000"], decisions=False, comes_back=True)
    envoy = Part("envoy", [sys.executable, "-c", "exit('lost')"], decisions=False)
    async with started(forever), started(envoy):
        with pytest.raises(StartError, match="demo: envoy ended with 1\n  lost"):
            await keep_running([forever, envoy])


def _count_in(folder: Path) -> int:
    return len(list(folder.iterdir()))
