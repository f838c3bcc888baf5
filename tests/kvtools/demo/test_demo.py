import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.base.errors import StartError
from kvtools.demo.demo import DemoProcess, Ports, keep_running, ready, run, started
from kvtools.demo.demo_workload import Row, compare, report
from tests.ports import free_port
from tests.waiting import until

LIVE = [{"endpoint": "a", "feeds": [{"state": "live", "reason": ""}]}]
GOOD = [Row(0, 0, "a", None, 0, 0), Row(0, 1, "a", "a", 16, 16), Row(1, 0, "b", None, 0, 0)]

# Half a dozen processes or more, which take seconds of CPU each.
on_a_busy_machine = pytest.mark.timeout(900)


@on_a_busy_machine
async def test_demo_passes_its_own_check() -> None:
    command = [sys.executable, "-m", "extproc", "demo", "--check", "--workers", "2"]
    command += ["--port", str(free_port())]
    demo = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    shown, _ = await demo.communicate()
    assert demo.returncode == 0, shown.decode()
    assert shown.decode().splitlines()[-1].endswith("predicted: ok")


async def test_demo_says_what_kept_it_from_comparing() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    gone = await compare(nobody, nobody, [], "tiny")
    assert gone.startswith("The conversations could not be compared: ")


@pytest.mark.slow
@on_a_busy_machine
async def test_demos_started_at_once_use_separate_ports() -> None:
    demos = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "extproc",
            "demo",
            "--check",
            "--port",
            str(free_port()),
            stdout=PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        for _ in range(2)
    ]
    shown = await asyncio.gather(*(demo.communicate() for demo in demos))
    assert [demo.returncode for demo in demos] == [0, 0], shown


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
def test_report_names_each_fault(
    rows: list[Row], workers: list[dict[str, Any]], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not report(rows, workers)
    assert f"FAULT {fault}" in capsys.readouterr().out


def test_report_accepts_good_figures() -> None:
    assert report(GOOD, LIVE)


@pytest.mark.parametrize(
    ("workers", "check", "fault"),
    [(0, False, "at least 1"), (1, True, "at least 2"), (3000, False, "at most 64")],
)
def test_worker_count_out_of_bounds_is_refused(workers: int, fault: str, *, check: bool) -> None:
    with pytest.raises(StartError, match=f"--workers must be {fault}"):
        run(workers=workers, port=free_port(), check=check)


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_run_refuses_an_invalid_port(port: int) -> None:
    with pytest.raises(StartError, match="--port must be 1 to 65535"):
        run(workers=1, port=port, check=False)


@pytest.mark.parametrize("options", [[], ["--check"]])
@pytest.mark.slow
@on_a_busy_machine
async def test_demo_stops_during_its_start(options: Sequence[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "extproc", "demo", "--port", str(free_port()), *options]
    demo = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "TMPDIR": f"{tmp_path}"}
    )
    await until(lambda: _left_in(tmp_path) or demo.returncode is not None, "it has begun")
    assert demo.returncode is None
    demo.send_signal(signal.SIGTERM)
    assert await demo.wait() == 130
    assert not _left_in(tmp_path)


def _left_in(folder: Path) -> bool:
    """Whether a demo in this folder has begun, and not cleaned up yet."""
    return bool(list(folder.glob("kvsteer-demo-*")))


def test_port_of_another_envoy_is_refused() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            run(workers=1, port=port, check=False)


async def test_ready_names_a_part_that_ended_with_its_last_words() -> None:
    part = DemoProcess("envoy", [sys.executable, "-c", "exit('no room')"], decisions=False)
    async with started(part):
        with pytest.raises(StartError, match="demo: envoy ended with 1"):
            await ready([f"http://127.0.0.1:{free_port()}/"], [part])
        assert await part.ended() == "envoy ended with 1\n  no room"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_part_that_a_signal_ended_says_so_without_its_last_lines(number: int) -> None:
    says = "import time; print('live', flush=True); time.sleep(1000)"
    worker = DemoProcess("worker a", [sys.executable, "-c", says], decisions=False)
    async with started(worker):
        await until(worker.last_output, "the worker says something")
        os.kill(worker.pid, number)
        assert await worker.ended() == f"worker a was ended by {signal.Signals(number).name}"


async def test_part_ends_with_its_last_lines_besides_decisions() -> None:
    says = "print('decision: a'); print('no room'); print('decision: b'); exit(3)"
    router = DemoProcess("router", [sys.executable, "-c", says], decisions=False)
    async with started(router):
        assert await router.ended() == "router ended with 3\n  no room"


async def test_ready_names_parts_that_are_late_with_their_output() -> None:
    waits = "import time; print('no feed is live', flush=True); time.sleep(1000)"
    router = DemoProcess("router", [sys.executable, "-c", waits], decisions=False)
    async with started(router):
        await until(router.last_output, "the router says something")
        with pytest.raises(StartError, match="last output of router:\n  no feed is live"):
            await ready([f"http://127.0.0.1:{free_port()}/readyz"], [router], 1.0)


async def test_ready_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}/readyz"
    with pytest.raises(StartError):
        await ready([url], [], 1.0, notice_seconds=0.01)
    assert capsys.readouterr().out.startswith(f"Waiting for {url}: ")


async def test_ready_notices_an_ended_part_behind_another_server() -> None:
    async def says_ready(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/ready", says_ready)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()
    envoy = DemoProcess("envoy", [sys.executable, "-c", "exit('cannot bind')"], decisions=False)
    async with started(envoy):
        await envoy.ended()
        with pytest.raises(StartError, match="envoy ended with 1\n  cannot bind"):
            await ready([f"http://127.0.0.1:{port}/ready"], [envoy])
    await runner.cleanup()


async def test_ports_differ_for_demos_started_at_once() -> None:
    asks = """
import sys
from kvtools.demo.demo import Ports, configuration
with Ports() as ports:
    print(configuration(2, int(sys.argv[1]), ports, "/a") + "---", flush=True)
    sys.stdin.read()
"""
    demos = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", asks, str(free_port()), stdin=PIPE, stdout=PIPE
        )
        for _ in range(3)
    ]
    ports: list[str] = []
    for demo in demos:
        assert demo.stdout is not None
        ports += re.findall(r"127\.0\.0\.1:(\d+)", (await demo.stdout.readuntil(b"---")).decode())
    for demo in demos:
        await demo.communicate(b"")
    assert len(ports) == len(set(ports)) == 33


def test_ports_of_a_demo_are_distinct() -> None:
    with Ports() as ports:
        first = ports.any()
        assert ports.free(first) != first
        with pytest.raises(StartError, match=f"127.0.0.1:{first}: this demo has it"):
            ports.take(first)


def test_port_of_another_demo_is_refused() -> None:
    port = free_port()
    holds = (
        "import sys; from kvtools.demo.demo import Ports\n"
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


async def test_keep_running_reports_and_restarts_an_ended_worker(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    once = f"import os; os.mkdir('{tmp_path}/' + str(os.getpid())); exit('killed')"
    worker = DemoProcess("worker a", [sys.executable, "-c", once], decisions=False, comes_back=True)
    async with started(worker):
        keeping = asyncio.create_task(keep_running([worker], again_seconds=0.01))
        await until(lambda: _count_in(tmp_path) >= 3 or keeping.done(), "it came back twice")
        assert not keeping.done()
        keeping.cancel()
        await asyncio.wait([keeping])
    shown = capsys.readouterr().out
    assert "worker a ended with 1\n  killed\n  it restarts in 0.01 s\n" in shown
    assert "worker a has restarted" in shown


async def test_restart_waits_until_the_port_is_free_and_says_once_who_has_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    port = free_port()
    once = f"import os; os.mkdir('{tmp_path}/' + str(os.getpid())); exit('killed')"
    command = [sys.executable, "-c", once]
    part = DemoProcess("router", command, decisions=False, comes_back=True, ports=[port])
    async with started(part), _listening(port) as other:
        keeping = asyncio.create_task(keep_running([part], again_seconds=0.01))
        said: list[str] = []

        def says_it() -> bool:
            said.append(capsys.readouterr().out)
            return "waits" in "".join(said)

        await until(says_it)
        assert _count_in(tmp_path) == 1
        other.terminate()
        await until(lambda: _count_in(tmp_path) > 1 or keeping.done(), "it restarted")
        keeping.cancel()
        await asyncio.wait([keeping])
    shown = "".join([*said, capsys.readouterr().out])
    assert shown.count("waits") == 1
    assert f"\n  router waits, since process {other.pid} (" in shown
    assert f"listens on 127.0.0.1:{port}; `kill {other.pid}` ends it\n" in shown


@contextlib.asynccontextmanager
async def _listening(port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that listens on a port."""
    listens = f"import socket; s = socket.create_server(('127.0.0.1', {port})); print(flush=True)"
    command = [sys.executable, "-c", f"{listens}; import time; time.sleep(1000)"]
    other = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert other.stdout is not None
    await other.stdout.readline()
    try:
        yield other
    finally:
        with contextlib.suppress(ProcessLookupError):
            other.kill()
        await other.communicate()


async def test_port_that_is_taken_is_refused_with_the_process_that_has_it() -> None:
    port = free_port()
    async with _listening(port) as other:
        with Ports() as ports, pytest.raises(StartError) as refused:
            ports.take(port)
    shown = str(refused.value)
    start = f"demo: cannot listen on 127.0.0.1:{port}: Address already in use: process {other.pid} "
    assert shown.startswith(start)
    assert shown.endswith(f"end it (`kill {other.pid}`), or choose another with --port")


async def _output_of(*words: str) -> tuple[int | None, str]:
    """Returns the exit status and the output of a command of kvsteer."""
    command = [sys.executable, "-m", "extproc", *words]
    asked = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    shown, _ = await asked.communicate()
    return asked.returncode, shown.decode()


async def _is_healthy(*words: str) -> bool:
    """Returns whether a check of health finds nothing wrong."""
    return await _output_of(*words) == (0, "")


@pytest.mark.slow
@on_a_busy_machine
async def test_demo_prints_commands_that_work() -> None:
    command = [sys.executable, "-m", "extproc", "demo", "--port", str(free_port())]
    demo = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    try:
        assert demo.stdout is not None
        said = (await demo.stdout.readuntil(b"Decisions appear")).decode()
        printed = {
            words[0]: words for words in map(str.split, re.findall(r"`kvsteer ([^`]+)`", said))
        }
        assert set(printed) == {"top", "report", "whatif", "why", "health", "doctor"}
        assert await _output_of(*printed["health"]) == (0, "")
        status, shown = await _output_of(*printed["top"], "--once")
        assert (status, shown[:18]) == (0, "3 workers: 3 live;")
        status, shown = await _output_of(*printed["report"])
        assert (status, " of their prompt tokens cached" in shown) == (0, True)
        status, shown = await _output_of(*printed["whatif"], "--seeds", "1")
        assert (status, "108 requests" in shown, "as recorded" in shown) == (0, True, True)
        status, shown = await _output_of(*printed["why"])
        assert (status, "\nLast turns:\n" in shown) == (0, True), shown
        status, shown = await _output_of(*printed["doctor"])
        assert (status, "\n0 wrong, " in shown) == (0, True), shown
        os.kill(int(re.findall(r"(\d+)  router", said)[0]), signal.SIGKILL)
        await demo.stdout.readuntil(b"router was ended by SIGKILL")
        demo.send_signal(signal.SIGSTOP)  # it must not restart the router first
        status, shown = await _output_of(*printed["health"])
        assert (status, "no router listens there" in shown) == (1, True)
        serve = [sys.executable, "-m", "extproc", "serve", printed["doctor"][1]]
        by_hand = await asyncio.create_subprocess_exec(*serve, stderr=PIPE)
        assert by_hand.stderr is not None
        await by_hand.stderr.readuntil(b"serving ext_proc on")  # it is ready later
        await until(partial(_is_healthy, *printed["health"]), "the router is ready")
        by_hand.send_signal(signal.SIGTERM)
        await by_hand.communicate()
        assert by_hand.returncode == 0
    finally:
        demo.send_signal(signal.SIGCONT)
        demo.send_signal(signal.SIGTERM)
        await demo.communicate()


@pytest.mark.slow
@on_a_busy_machine
async def test_demo_continues_when_the_router_is_killed_as_it_suggests(tmp_path: Path) -> None:
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
        await demo.stdout.readuntil(b"router was ended by SIGKILL\n  it restarts in 15 s\n")
        async with aiohttp.ClientSession() as session:
            request = {"model": "tiny", "max_tokens": 1, "prompt": "hello"}
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with session.post(url, json=request) as response:
                assert response.status == 200
        assert demo.returncode is None
    finally:
        demo.send_signal(signal.SIGTERM)
        await demo.communicate()


async def test_demo_ends_with_envoy() -> None:
    forever = DemoProcess("worker a", ["sleep", "1000"], decisions=False, comes_back=True)
    envoy = DemoProcess("envoy", [sys.executable, "-c", "exit('lost')"], decisions=False)
    async with started(forever), started(envoy):
        with pytest.raises(StartError, match="demo: envoy ended with 1\n  lost"):
            await keep_running([forever, envoy])


def _count_in(folder: Path) -> int:
    return len(list(folder.iterdir()))
