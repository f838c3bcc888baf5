"""Routers' parts in sharing, over real transports."""

import asyncio
import logging
import os
import re
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from extproc.base.errors import StartError
from extproc.config.sections import SharingSettings as Options
from extproc.routing.claims.claim_table import ClaimTable, Holdings
from extproc.routing.claims.homes import Homes
from extproc.routing.claims.lines import Lines
from extproc.routing.load.endpoint_load import EndpointLoad
from extproc.routing.load.loads import Loads
from extproc.sharing.carriers import MAX_UNREAD_BYTES
from extproc.sharing.messages import RouterReport, decoded, encoded
from extproc.sharing.reporter import Reporter
from extproc.sharing.sharing import Sharing, SharingCollector, reporter_of
from tests.extproc.sharing.engine_process import EngineProcess, needs_engine, running_engine
from tests.extproc.sharing.routers import WORKERS
from tests.faults import said
from tests.waiting import until

A, B = WORKERS
WAIT_SECONDS = 60.0


class Fleet:
    """Two workers, as one router sees them."""

    def __init__(self, touched: set[str]) -> None:
        self.endpoints = {worker: EndpointLoad() for worker in WORKERS}
        self.loads = Loads(self.endpoints, 1, touched)
        self.changed = asyncio.Event()
        self.by_name = {worker: Holdings(worker) for worker in WORKERS}

    def places(self) -> list[tuple[str, str]]:
        return [(worker, worker) for worker in self.endpoints]

    def holdings(self, name: str) -> Holdings:
        return self.by_name[name]

    def next_change(self) -> asyncio.Event:
        return self.changed


class Clock:
    """The machine's clock, which a test sets ahead as if the router had stood still."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_seconds


class Part:
    """One router's part in sharing."""

    def __init__(
        self, sharing: Sharing, fleet: Fleet, reporter: Reporter, clock: Clock, lines: Lines
    ) -> None:
        self.sharing = sharing
        self.lines = lines
        self.fleet = fleet
        self.reporter = reporter
        self.clock = clock

    def others(self, worker: str = A) -> float:
        return self.fleet.loads.load(worker, self.clock()).others

    def send(self, worker: str = A) -> None:
        self.fleet.loads.begin(worker, 500, self.clock())

    def is_alone(self) -> bool:
        return bool(self.sharing.hindrance())

    def hears(self) -> bool:
        return bool(self.sharing.others.peers)


class Sender:
    """A stranger that can reach the engine and publishes zeros."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def publish(self, size: int) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        _, writer = self._streams
        begin = f"*3\r\n$7\r\nPUBLISH\r\n$7\r\nkvsteer\r\n${size}\r\n"
        writer.write(begin.encode() + bytes(size) + b"\r\n")
        await writer.drain()

    async def close(self) -> None:
        assert self._streams is not None
        self._streams[1].close()


@asynccontextmanager
async def part(**options: Any) -> AsyncIterator[Part]:
    chosen = Options(**options)
    reporter = reporter_of(chosen)
    fleet, clock = Fleet(reporter.touched), Clock()
    sent, homes = ClaimTable(reporter.secret), Homes(reporter.secret)
    lines = Lines(reporter.secret, 10.0, 100)
    sharing = Sharing(chosen, reporter, fleet, sent, homes, lines, clock)
    sharing.start()
    try:
        yield Part(sharing, fleet, reporter, clock, lines)
    finally:
        await sharing.close()


@asynccontextmanager
async def two(**options: Any) -> AsyncIterator[tuple[Part, Part]]:
    async with part(name="one", **options) as one, part(name="other", **options) as other:
        await until(lambda: one.hears() and other.hears(), "they hear each other")
        yield one, other


@asynccontextmanager
async def ways(kind: str, folder: Path) -> AsyncIterator[dict[str, Any]]:
    """The configuration of one way in which routers meet."""
    async with AsyncExitStack() as stack:
        if kind == "directory":
            yield {"url": f"directory:{folder / 'routers'}"}
        elif kind == "tcp":
            yield {"url": (await stack.enter_async_context(running_engine(folder))).url}
        elif kind == "socket":
            path = folder / "engine.sock"
            await stack.enter_async_context(running_engine(folder, "--unixsocket", str(path)))
            yield {"url": f"unix://{path}"}
        else:
            yield await _with_tls(folder, stack)


async def _with_tls(folder: Path, stack: AsyncExitStack) -> dict[str, Any]:
    """The configuration for an engine with TLS, a user and a password."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = {name: folder / name for name in ("ca.pem", "tls.crt", "tls.key", "password")}
    files["ca.pem"].write_bytes(authority.cert_pem.bytes())
    files["tls.crt"].write_bytes(issued.cert_chain_pems[0].bytes())
    files["tls.key"].write_bytes(issued.private_key_pem.bytes())
    engine = EngineProcess(
        folder, "--port", "0", "--tls-auth-clients", "no", "--tls-ca-cert-file",
        str(files["ca.pem"]), "--tls-cert-file", str(files["tls.crt"]), "--tls-key-file",
        str(files["tls.key"]), "--user", "default", "off", "--user", "router", "on",
        ">open-sesame-twice", "&kvsteer", "+@all",
    )  # fmt: skip
    files["password"].write_text("open-sesame-twice\n")
    engine.options += ("--tls-port", str(engine.port))
    stack.push_async_callback(engine.end)
    await engine.start()
    return {
        "url": f"rediss://127.0.0.1:{engine.port}",
        "ca": str(files["ca.pem"]),
        "username": "router",
        "password_file": str(files["password"]),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "directory",
        *(pytest.param(kind, marks=needs_engine) for kind in ("tcp", "socket", "tls")),
    ],
)
async def test_request_of_a_router_is_load_for_the_other(kind: str, tmp_path: Path) -> None:
    async with ways(kind, tmp_path) as options, two(**options) as (one, other):
        one.send()
        await until(lambda: other.others() == 1, "the other counts the request")
        assert not any(each.is_alone() for each in (one, other))
        (seen,) = other.sharing.status()["routers"]
        assert (seen["name"], seen["in_flight"], seen["lost"]) == ("one", 1, 0)
        assert one.others() == 0


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_sharing_pauses_without_its_engine_and_resumes_with_it(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvsteer.sharing")
    async with running_engine(tmp_path) as engine, two(url=engine.url) as (one, other):
        one.send()
        await until(lambda: other.others() == 1, "shared")
        if fault == "killed":
            await engine.end()
        else:
            engine.process.send_signal(signal.SIGSTOP)
        await until(lambda: one.is_alone() and other.is_alone(), "alone")
        await until(lambda: not one.lines.is_current, "nobody waits for room any more")
        await until(lambda: other.others() == 0 and not other.hears(), "forgotten")
        assert engine.url in said(other.sharing)
        one.send()
        if fault == "killed":
            await engine.start()
        else:
            engine.process.send_signal(signal.SIGCONT)
        await until(lambda: other.others() == 2, "shared again")
        await until(lambda: not (one.is_alone() or other.is_alone()), "not alone")
        await until(lambda: one.lines.is_current, "requests may wait again")
        assert said(other.sharing) == ""
    warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 2, [one.getMessage() for one in warnings]


@needs_engine
async def test_messages_are_dropped_while_the_engine_is_stopped(tmp_path: Path) -> None:
    async with running_engine(tmp_path) as engine, two(url=engine.url) as (one, other):
        engine.process.send_signal(signal.SIGSTOP)
        before = one.sharing.sent
        await until(one.is_alone, "alone")
        reports, untold = one.sharing.sent, one.sharing.not_sent
        one.send()
        await until(lambda: one.sharing.not_sent > untold + 10, "ticks go by")
        assert one.sharing.sent - reports < one.sharing.not_sent - untold
        assert reports - before < 100
        engine.process.send_signal(signal.SIGCONT)
        await until(lambda: other.others() == 1, "shared again")


@needs_engine
async def test_refused_login_leaves_a_router_alone_and_logs_no_password(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("not-this-one")
    options = {"password_file": str(tmp_path / "password")}
    async with (
        running_engine(tmp_path, "--requirepass", "another") as engine,
        part(url=engine.url, **options) as one,
    ):
        await until(lambda: "invalid username-password" in said(one.sharing), "refused")
        assert "not-this-one" not in said(one.sharing)


@needs_engine
async def test_missing_permission_to_publish_leaves_a_router_alone(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("word")
    user = ("--user", "listener", "on", ">word", "&*", "+@all", "-publish")
    async with (
        running_engine(tmp_path, *user) as engine,
        part(url=engine.url, username="listener", password_file=str(tmp_path / "password")) as one,
    ):
        await until(lambda: "permission" in said(one.sharing).lower(), "refused")


@needs_engine
async def test_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.pem").write_bytes(trustme.CA().cert_pem.bytes())
    async with (
        ways("tls", tmp_path) as options,
        part(**{**options, "ca": str(tmp_path / "other.pem")}) as one,
    ):
        await until(lambda: "certificate verify failed" in said(one.sharing), "refused")


@needs_engine
async def test_routers_with_another_secret_or_channel_share_no_load(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_text(f"a secret of the {name} fleet")
    async with (
        running_engine(tmp_path) as engine,
        part(url=engine.url, secret_file=str(tmp_path / "first")) as one,
        part(url=engine.url, secret_file=str(tmp_path / "second")) as other,
        part(url=engine.url, channel="elsewhere") as third,
    ):
        await until(lambda: other.sharing.others.counts["other_secret"] > 3, "told apart")
        assert not any(each.hears() for each in (one, other, third))


@needs_engine
async def test_invalid_messages_are_counted_and_ignored(tmp_path: Path) -> None:
    async with running_engine(tmp_path) as engine, two(url=engine.url) as (one, other):
        for _ in range(3):
            await engine.ask("PUBLISH", "kvsteer", "x" * 100)
        await engine.ask("PUBLISH", "kvsteer", "")
        await until(lambda: one.sharing.others.counts["other_version"] == 3, "counted")
        await until(lambda: one.sharing.others.counts["wrong_size"] == 1, "counted")
        other.send()
        await until(lambda: one.others() == 1, "shared")


@needs_engine
async def test_flood_uses_a_bounded_share_of_the_time(tmp_path: Path) -> None:
    async with running_engine(tmp_path) as engine, two(url=engine.url) as (one, _):
        sender = Sender(engine.port)
        for _ in range(400):
            await sender.publish(60_000)
        await until(lambda: one.sharing.others.counts["other_version"] >= 50, "heard")
        await sender.close()
        assert one.sharing.hearing.worked_seconds < 0.1


async def test_messages_with_the_own_tag_count_against_the_budget(
    tmp_path: Path,
) -> None:
    async with part(url=f"directory:{tmp_path}") as one:
        one.sharing.hearing.most_seconds = 0.0
        own = encoded(
            RouterReport(one.reporter.origin, one.reporter.incarnation, 1, 0), one.reporter.keys
        )
        assert max(one.sharing.hear(own) for _ in range(3)) > 0.0
        assert not one.sharing.received_bytes


# Most bytes that asyncio reads at once: the rest of a message may arrive with the last of them.
READ_BYTES = 256 * 1024


async def listeners(engine: EngineProcess) -> set[str]:
    """The numbers of the connections that listen, which the engine never gives twice."""
    return set(re.findall(r"\bid=(\d+)", await engine.ask("CLIENT", "LIST", "TYPE", "pubsub")))


@needs_engine
async def test_endless_message_is_not_kept_and_sharing_resumes(tmp_path: Path) -> None:
    async with running_engine(tmp_path) as engine, two(url=engine.url) as (one, other):
        before = await listeners(engine)
        sender = Sender(engine.port)
        await sender.publish(MAX_UNREAD_BYTES + READ_BYTES + 1)
        await sender.close()

        async def have_connected_anew() -> bool:
            now = await listeners(engine)
            return len(now) == len(before) == 2 and before.isdisjoint(now)

        await until(have_connected_anew, "both have connected anew")
        other.send()
        await until(lambda: one.others() == 1, "shared again")


@needs_engine
async def test_flooded_router_hears_the_rest_afterwards(tmp_path: Path) -> None:
    async with running_engine(tmp_path) as engine, two(url=engine.url) as (one, _):
        hearing = one.sharing.hearing
        hearing.passed_seconds = hearing.worked_seconds = 1.0
        hearing.ends_at = one.clock() + 1.0
        sender = Sender(engine.port)
        for _ in range(20):
            await sender.publish(1_000)
        await until(lambda: one.sharing.others.counts["other_version"] == 20, "heard")
        await sender.close()


async def test_dead_socket_of_a_directory_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "1-dead.router"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(left))
    async with part(url=f"directory:{tmp_path}"):
        await until(lambda: not left.exists(), "removed")


async def test_directory_is_private_and_left_empty(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "routers"
    async with part(url=f"directory:{directory}"):
        await until(lambda: any(directory.glob("*.router")), "there")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (own,) = directory.glob("*.router")
        assert stat.S_IMODE(own.stat().st_mode) == 0o600
    assert not any(directory.iterdir())


async def test_unusable_directory_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("")
    async with part(url=f"directory:{file}") as one:
        await until(lambda: "exists" in said(one.sharing), "said")
        file.unlink()
        await until(lambda: not one.is_alone(), "used")
        (own,) = file.glob("*.router")
        own.unlink()
        await until(lambda: any(file.glob("*.router")), "made anew")


async def test_directory_replaced_by_another_file_is_tried_again(tmp_path: Path) -> None:
    directory = tmp_path / "routers"
    async with part(url=f"directory:{directory}") as one:
        await until(lambda: any(directory.glob("*.router")), "used")
        shutil.rmtree(directory)
        directory.write_text("")
        await until(lambda: "exists" in said(one.sharing), "said")
        directory.unlink()
        await until(lambda: not one.is_alone(), "used again")


async def test_note_names_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    async with part(url=f"directory:{tmp_path / ('long' * 30)}") as one:
        await until(lambda: "path too long" in said(one.sharing), "said")


async def test_router_that_does_not_read_blocks_no_other(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "1-deaf.router"))
        async with two(url=f"directory:{tmp_path}") as (one, other):
            transport = one.sharing.transport
            await until(lambda: transport.lost > 0, "it is full")  # type: ignore[attr-defined]
            one.send()
            await until(lambda: other.others() == 1, "shared")


async def test_added_workers_are_known_from_then_on(tmp_path: Path) -> None:
    async with two(url=f"directory:{tmp_path}") as (one, other):
        record = other.fleet.endpoints.pop(A)
        other.fleet.changed = asyncio.Event()
        one.send()
        await until(lambda: other.sharing.others.unknown_workers > 0, "not known")
        other.fleet.endpoints[A] = record
        other.fleet.changed = asyncio.Event()
        await until(lambda: other.others() == 1, "known by the next whole report")


async def test_sharing_metrics_count_messages(tmp_path: Path) -> None:
    async with two(url=f"directory:{tmp_path}") as (one, other):
        await until(lambda: one.sharing.others.counts["accepted"] > 3, "heard")
        shown = {
            (sample.name, *sample.labels.values()): sample.value
            for family in SharingCollector(one.sharing).collect()
            for sample in family.samples
        }
        assert shown["kvsteer_sharing_alone",] == 0
        assert shown["kvsteer_sharing_routers",] == 1
        assert shown["kvsteer_sharing_messages_total", "accepted"] > 3
        assert shown["kvsteer_sharing_bytes_total", "sent"] > 100
        assert 0 <= shown["kvsteer_sharing_age_seconds", "other"] < 10
        assert other.sharing.sent_bytes > 100


def test_unusable_secret_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"sharing.secret_file: .*: No such file"):
        reporter_of(Options("directory:/x", secret_file=str(tmp_path / "none")))
    (tmp_path / "short").write_text("short\n")
    with pytest.raises(StartError, match="has 5 bytes; 16 are the least"):
        reporter_of(Options("directory:/x", secret_file=str(tmp_path / "short")))


def test_router_has_a_name_of_its_own() -> None:
    assert str(os.getpid()) in reporter_of(Options("directory:/x")).origin


def test_router_name_is_valid_for_any_host_name() -> None:
    reporter = reporter_of(Options("directory:/x"), "Zoë's host " * 9)
    (message,) = reporter.compose(Loads({}), 0.0, 0)
    assert decoded(message, reporter.keys).origin == reporter.origin


async def test_start_error_names_the_missing_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "libvalkey", None)
    with pytest.raises(StartError, match=r"pip install '.\[sharing\]' in a clone"):
        async with part(url="redis://127.0.0.1:1"):
            pass


async def test_pause_of_a_router_is_not_taken_for_silence_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvsteer.sharing")
    async with two(url=f"directory:{tmp_path}", tick_ms=50) as (one, other):
        one.send()
        await until(lambda: other.others() == 1, "shared")
        for part in (one, other):  # as on a machine that was busy with something else
            part.clock.ahead_seconds += 3_600.0
        heard = [part.sharing.others.counts["accepted"] for part in (one, other)]
        await until(
            lambda: all(
                part.sharing.others.counts["accepted"] > before
                for part, before in zip((one, other), heard, strict=True)
            ),
            "they hear each other again",
        )
        assert other.others() == 1
    assert not [record for record in caplog.records if "is silent" in record.getMessage()]


@pytest.mark.slow
async def test_outages_that_repeat_are_logged_less_and_less_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvsteer.sharing")
    directory = tmp_path / "routers"
    async with part(name="one", url=f"directory:{directory}") as one:
        await until(lambda: not one.is_alone(), "it is there")
        for _ in range(5):
            shutil.rmtree(directory)
            directory.touch()
            await until(one.is_alone, "alone")
            directory.unlink()
            await until(lambda: not one.is_alone(), "not alone")
            one.clock.ahead_seconds += 2.0
            await until(lambda: not one.sharing.outages.is_going_on, "it is settled")
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.INFO] * 3  # the first, second and fourth time


async def test_request_is_sent_at_once_after_an_idle_time(
    tmp_path: Path,
) -> None:
    options = {"url": f"directory:{tmp_path / 'routers'}", "tick_ms": 3_600_000}
    async with part(name="one", **options) as one, part(name="other", **options) as other:
        await until(lambda: not one.is_alone() and not other.is_alone(), "they are there")
        one.send()
        one.reporter.begin([], A, 500)
        await until(lambda: other.others() == 1, "the other hears of it long before the next tick")
