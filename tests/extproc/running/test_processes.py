"""Several router processes with one configuration, and the parent that keeps them running."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import stat
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from extproc.base import address
from extproc.base.errors import ConfigError
from extproc.config.reader import parse
from extproc.config.sections import SharingSettings
from extproc.running.processes import Processes, ProcessMember
from tests.ports import free_ports_apart
from tests.waiting import until

MINIMAL = {"models": [{"name": "m"}], "workers": [{"endpoint": "127.0.0.1:1"}]}


def configuration(folder: Path, **sections: Any) -> Path:
    extproc, admin, metrics = (f"127.0.0.1:{free_ports_apart(2)}" for _ in range(3))
    whole = {
        **MINIMAL,
        "extproc": {"listen": extproc, "processes": 2},
        "admin": {"listen": admin},
        "metrics": {"listen": metrics},
        **sections,
    }
    file = folder / "kvsteer.yaml"
    file.write_text(yaml.safe_dump(whole))
    return file


class ParentSpan:
    """A parent in its own process, and its child processes."""

    def __init__(self, process: Process, config: Path, log: Path) -> None:
        self.process = process
        metrics = yaml.safe_load(config.read_text())["metrics"]["listen"]
        self.metrics = [address.nth(metrics, number) for number in range(2)]
        self._log = log

    def said(self) -> str:
        return self._log.read_text()

    def pids(self, number: int) -> list[int]:
        """The ids that a process has had, the latest last."""
        return [int(pid) for pid in re.findall(rf"process {number} of 2 .* pid (\d+)", self.said())]

    async def is_ready(self, number: int) -> bool:
        assert self.process.returncode is None, self.said()
        url = f"http://{self.metrics[number]}/readyz"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def all_ready(self) -> bool:
        return await self.is_ready(0) and await self.is_ready(1)


@contextlib.asynccontextmanager
async def parent(config: Path, *options: str) -> AsyncIterator[ParentSpan]:
    log = config.with_name("log")
    command = [sys.executable, "-m", "extproc", "serve", "--config", str(config), *options]
    environment = {**os.environ, "TMPDIR": str(config.parent)}
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stderr=errors, env=environment
        )
    one = ParentSpan(process, config, log)
    try:
        yield one
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await until(gone([*one.pids(0), *one.pids(1)]), "all processes are gone")


def gone(pids: Sequence[int]) -> Callable[[], Awaitable[bool]]:
    async def are_gone() -> bool:
        return not [pid for pid in pids if runs(pid)]

    return are_gone


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_processes_have_addresses_of_their_own_and_end_with_the_parent(
    tmp_path: Path,
) -> None:
    async with parent(configuration(tmp_path)) as one:
        await until(one.all_ready, "both are ready")
        one.process.send_signal(signal.SIGHUP)

        async def both_read_again() -> bool:
            return one.said().count("configuration read again: nothing changed") == 2

        await until(both_read_again, "SIGHUP reaches both")
        one.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(one.process.wait(), 60) == 0
        assert one.said().count("stopping: ") == 2


def modes(folder: Path, pattern: str) -> list[int]:
    return [stat.S_IMODE(one.stat().st_mode) for one in folder.glob(pattern)]


async def test_sockets_shared_by_processes_are_private_to_their_user() -> None:
    with tempfile.TemporaryDirectory() as directory:  # a socket's path has 107 bytes at most
        folder = Path(directory)
        async with parent(configuration(folder)) as one:
            await until(one.all_ready, "both are ready")
            assert modes(folder, "kvsteer-*") == [0o700]
            await until(lambda: modes(folder, "kvsteer-*/*.router") == [0o600] * 2)


@given(
    st.lists(
        st.binary(max_size=80)
        | st.floats().map(lambda number: repr(number).encode())
        | st.sampled_from(
            [b"nan", b"inf", b"-0.001", b"100.1", b"1e999", b"5" + b" " * 64, b"\xff"]
        )
    )
)
async def test_follow_steers_no_other_percentage_than_one_from_0_to_100(
    contents: list[bytes],
) -> None:
    steered: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        member = ProcessMember(0, 2, directory)
        following = asyncio.create_task(member.follow(steered.append, look_seconds=0.0))
        for content in (*contents, b"7.25"):
            new = Path(directory) / "new"
            new.write_bytes(content)
            new.replace(Path(directory) / "steering")
            for _ in range(3):
                await asyncio.sleep(0)
        await until(lambda: steered[-1:] == [7.25] or following.done(), "the last is followed")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert steered[-1] == 7.25
    assert all(0 <= percent <= 100 for percent in steered)


async def test_steering_share_set_at_one_process_holds_for_all(tmp_path: Path) -> None:
    file = configuration(tmp_path)
    listen = yaml.safe_load(file.read_text())["admin"]["listen"]
    urls = [f"http://{address.nth(listen, number)}/steering" for number in range(2)]
    async with parent(file) as one, aiohttp.ClientSession() as session:

        def all_steer(percent: float) -> Callable[[], Awaitable[bool]]:
            async def do_all() -> bool:
                done = []
                for url in urls:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with session.get(url) as response:
                            done.append((await response.json())["percent"])
                return done == [percent] * 2

            return do_all

        await until(one.all_ready, "both are ready")
        async with session.post(urls[1], json={"percent": 12.5}) as response:
            assert response.status == 200
        await until(all_steer(12.5), "both follow")
        os.kill(one.pids(0)[0], signal.SIGKILL)

        async def is_new() -> bool:
            return len(one.pids(0)) == 2

        await until(is_new, "it is started anew")
        await until(all_steer(12.5), "a new process follows too")
        file.write_text(f"{file.read_text()}\nsteering: {{percent: 30}}\n")

        async def read_again() -> bool:
            one.process.send_signal(signal.SIGHUP)
            return await all_steer(30.0)()

        await until(read_again, "both read the file")


async def test_killed_process_returns_while_the_other_continues(tmp_path: Path) -> None:
    async with parent(configuration(tmp_path)) as one:
        await until(one.all_ready, "both are ready")
        os.kill(one.pids(1)[0], signal.SIGKILL)

        async def is_new() -> bool:
            assert await one.is_ready(0)
            return len(one.pids(1)) == 2 and await one.is_ready(1)

        await until(is_new, "the process is there again")
        assert "process 1 was ended by SIGKILL: restarting it in " in one.said()
        assert len(one.pids(0)) == 1


async def test_processes_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    async with parent(configuration(tmp_path)) as one:
        await until(one.all_ready, "both are ready")
        one.process.kill()  # parent() then waits for the others
    left = [*tmp_path.glob("kvsteer-*"), *tmp_path.glob("kvsteer-*/*")]
    assert not left, one.said()


async def test_process_that_cannot_start_ends_all(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    host, port = address.parse(
        address.nth(yaml.safe_load(config.read_text())["extproc"]["listen"], 1)
    )
    with socket.create_server((host, port)):
        async with parent(config) as one:
            assert await asyncio.wait_for(one.process.wait(), 60) == 1
    assert f"cannot listen on {host}:{port}" in one.said()
    assert "process 1 does not start: stopping all others" in one.said()


@pytest.mark.parametrize(
    "fails",
    [[sys.executable, "-c", "raise SystemExit(3)"], ["/there/is/no/such/program"]],
    ids=["ends with an error", "cannot be made"],
)
async def test_process_that_fails_after_readiness_is_restarted(
    fails: Sequence[str], tmp_path: Path
) -> None:
    there = tmp_path / "there"
    lasts = [sys.executable, "-c", f"open({str(there)!r}, 'w'); import sys; sys.stdin.read()"]
    commands = iter([fails, lasts])
    running = asyncio.create_task(Processes(lambda _: next(commands), 1, lambda _: True).run())

    async def is_there() -> bool:
        assert not running.done()
        return there.exists()

    await until(is_there, "it is started anew")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 60)


@pytest.mark.parametrize(
    ("answer", "status"),
    [("signal.SIG_DFL", 0), ("lambda *_: sys.exit(0)", 0), ("lambda *_: sys.exit(3)", 1)],
    ids=["not yet listening", "ends", "fails"],
)
async def test_stopping_fails_only_if_a_process_does(
    answer: str, status: int, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    # a signal that comes just before a read blocks would not be answered
    waits = (
        f"import select, signal, sys; signal.signal(signal.SIGTERM, {answer})\n"
        f"open({str(there)!r}, 'w').close()\n"
        "while not select.select([sys.stdin], [], [], 0.05)[0]: pass"
    )
    command = [sys.executable, "-c", waits]
    running = asyncio.create_task(Processes(lambda _: command, 1, lambda _: True).run())

    async def is_there() -> bool:
        return there.exists()

    await until(is_there, "it is started")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == status


async def test_sockets_of_killed_processes_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    config = configuration(tmp_path, extproc={"listen": f"unix:{path}"})
    async with parent(config, "--processes", "2") as one:
        await until(one.all_ready, "both are ready")
        os.kill(one.pids(1)[0], signal.SIGKILL)

        async def is_new() -> bool:
            return len(one.pids(1)) == 2 and await one.is_ready(1)

        await until(is_new, "the process is there again")
        assert Path(f"{path}.1").is_socket()


def test_readiness_needs_every_process_once(tmp_path: Path) -> None:
    first, second = (ProcessMember(number, 2, str(tmp_path)) for number in range(2))
    asyncio.run(first.announce(lambda: True))
    assert first.hindrance() == second.hindrance() == "process 1 of 2 is not ready yet"
    readiness = iter([False, True])
    asyncio.run(second.announce(lambda: next(readiness)))
    assert first.hindrance() == second.hindrance() == ""


def test_part_of_gives_envoy_files_to_the_first_process_only() -> None:
    config = parse(yaml.safe_dump({**MINIMAL, "envoy": {"eds_directory": "/"}}), "c")
    parts = [
        ProcessMember.parse(str(ProcessMember(number, 3, "/a:b"))).part_of(config)
        for number in range(3)
    ]
    assert [part.envoy.eds_directory for part in parts] == ["/", None, None]
    assert [part.extproc.listen for part in parts] == [f"127.0.0.1:90{n}2" for n in range(3)]
    assert {part.sharing for part in parts} == {SharingSettings("directory:/a:b")}
    named = replace(config, sharing=SharingSettings("redis://a", name="r"))
    sharing = ProcessMember(2, 3, "/a").part_of(named).sharing
    assert sharing == SharingSettings("redis://a", name="r-2")


def test_part_of_gives_each_process_a_probe_server_of_its_own_where_there_is_one() -> None:
    config = parse(yaml.safe_dump({**MINIMAL, "probe": {"token_file": "t"}}), "c")
    parts = [ProcessMember(number, 2, "/a").part_of(config).probe for number in range(2)]
    assert [one and one.listen for one in parts] == ["127.0.0.1:9092", "127.0.0.1:9102"]
    assert ProcessMember(1, 2, "/a").part_of(replace(config, probe=None)).probe is None


def test_part_of_gives_each_process_a_recording_and_a_share_of_its_bytes() -> None:
    recorder = {"file": "trace.jsonl", "bytes": 3 << 20}
    config = parse(yaml.safe_dump({**MINIMAL, "recorder": recorder}), "c")
    parts = [ProcessMember(number, 3, "/a").part_of(config).recorder for number in range(3)]
    assert [one.file for one in parts] == ["trace.jsonl", "trace.jsonl.1", "trace.jsonl.2"]
    assert {one.bytes for one in parts} == {1 << 20}


@pytest.mark.parametrize(
    ("sections", "faults"),
    [
        ({"extproc": {"processes": 0}}, ["extproc.processes: must be at least 1, is 0"]),
        (
            {"extproc": {"processes": 2}, "admin": {"listen": "127.0.0.1:9012"}},
            ["extproc.listen of process 1: 127.0.0.1:9012 is taken: admin.listen is"],
        ),
        (
            {"extproc": {"processes": 3, "listen": "127.0.0.1:65530"}},
            ["extproc.listen: has no port for process 2: 65550 is above 65535"],
        ),
        (
            {"extproc": {"processes": 3, "listen": f"unix:/{'a' * 105}"}},
            ["extproc.listen: the socket's path has 108 bytes; the limit is 107"],
        ),
        (
            {
                "extproc": {"processes": 2},
                "workers": [
                    {"endpoint": "127.0.0.1:1", "events": {"drain": "http://127.0.0.1:1"}},
                    {"endpoint": "127.0.0.1:2", "events": {"zmq": "tcp://*:2", "bind": True}},
                ],
            },
            [
                "workers[0].events.drain: cannot be shared by 2 processes",
                "workers[1].events.bind: cannot be shared by 2 processes",
            ],
        ),
        (
            {
                "extproc": {"processes": 11},
                "sharing": {"url": "redis://a", "name": "n" * 62},
            },
            ["sharing.name: must be 1 to 61 printable ASCII characters without spaces"],
        ),
    ],
)
def test_unshareable_sections_are_faults_with_several_processes(
    sections: dict[str, Any], faults: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(yaml.safe_dump({**MINIMAL, **sections}), "c")
    for found, wanted in zip(raised.value.faults, faults, strict=True):
        assert found.startswith(f"c: {wanted}")
