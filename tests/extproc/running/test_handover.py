"""A router passes state and sockets on; whatever goes wrong, it goes on itself."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from extproc.base.errors import StartError
from extproc.running import handover
from extproc.running.handover import Handover, take_over
from tests.unprivileged import NOBODY
from tests.waiting import blocked_until, until

NOWHERE: dict[str, str] = {}


class Router:
    """The side of the router that runs."""

    def __init__(
        self, path: Path, listeners: dict[str, list[socket.socket]], user: int | None = None
    ) -> None:
        self.written = self.stopped = 0
        self.listeners = listeners
        self.handover = Handover(path, self.write, self.numbers, self.stop, user)

    async def write(self) -> None:
        self.written += 1

    def numbers(self) -> dict[str, list[int]]:
        return {name: [one.fileno() for one in each] for name, each in self.listeners.items()}

    def stop(self) -> None:
        self.stopped += 1

    @property
    def places(self) -> dict[str, str]:
        """Where it listens, as the configuration writes it."""
        found = {name: each[0].getsockname() for name, each in self.listeners.items()}
        return {name: f"{host}:{port}" for name, (host, port) in found.items()}


@pytest.fixture
def listeners() -> Iterator[dict[str, list[socket.socket]]]:
    names = ("extproc", "metrics", "admin")
    made = [(name, socket.create_server(("127.0.0.1", 0))) for name in names]
    yield {name: [one for its, one in made if its == name] for name in names}
    for _, one in made:
        one.close()


@pytest.fixture
def state_file(tmp_path: Path) -> str:
    return str(tmp_path / "state")


@pytest.fixture
async def router(
    state_file: str, listeners: dict[str, list[socket.socket]]
) -> AsyncIterator[Router]:
    router = Router(handover.place_of(state_file), listeners)
    router.handover.start()
    yield router
    await router.handover.close()


async def test_successor_gets_the_sockets_and_ends_the_router_once_it_serves(
    state_file: str, router: Router
) -> None:
    before = await asyncio.to_thread(take_over, state_file, router.places)
    assert before is not None
    assert (router.written, router.stopped) == (1, 0)
    places = {name: [one.getsockname() for one in each] for name, each in before.sockets.items()}
    assert places == {
        name: [one.getsockname() for one in each] for name, each in router.listeners.items()
    }
    await before.end()
    await until(lambda: router.stopped, "the router stops")
    for each in before.sockets.values():
        for one in each:
            one.close()
    await router.handover.close()
    assert handover.place_of(state_file).exists()  # it is the successor's now


async def test_only_its_own_user_may_ask(state_file: str, router: Router) -> None:
    assert stat.S_IMODE(handover.place_of(state_file).stat().st_mode) == 0o600


async def test_others_are_refused(
    state_file: str, listeners: dict[str, list[socket.socket]]
) -> None:
    router = Router(handover.place_of(state_file), listeners, user=os.geteuid() + 1)
    router.handover.start()
    with pytest.raises(StartError, match=r"passes no sockets on|Broken pipe|reset"):
        await asyncio.to_thread(take_over, state_file, NOWHERE)
    assert (router.written, router.stopped) == (0, 0)
    await router.handover.close()


async def test_successor_that_ends_before_it_serves_changes_nothing(
    state_file: str, router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # the router can be taken over again
        before = await asyncio.to_thread(take_over, state_file, router.places)
        assert before is not None
        before.close()
        await until(lambda: "this one goes on" in caplog.text, "it is noticed")
        caplog.clear()
    assert (router.written, router.stopped) == (2, 0)


async def test_another_version_gets_nothing(state_file: str, router: Router) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(handover.place_of(state_file)))
        other.sendall(b"kvsteer 9")
        other.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(other, 1) == b""
    assert router.written == 0


def test_nothing_is_taken_over_where_no_router_listens(
    state_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert take_over(state_file, NOWHERE) is None
    with socket.socket(socket.AF_UNIX) as killed:  # its router was killed
        killed.bind(str(handover.place_of(state_file)))
    assert take_over(state_file, NOWHERE) is None
    assert caplog.text.count("starts as usual") == 2


async def test_router_that_cannot_listen_serves_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = Router(tmp_path / "no folder" / "sock", {})
    router.handover.start()
    await router.handover.close()
    assert "cannot listen" in caplog.text


async def test_gone_router_is_no_fault(
    state_file: str, router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    before = await asyncio.to_thread(take_over, state_file, router.places)
    assert before is not None
    await router.handover.close()
    await before.end()
    before.close()
    assert "has gone" in caplog.text


@contextlib.contextmanager
def answering(state_file: str, names: bytes, numbers: list[int]) -> Iterator[None]:
    """A process that answers as the running router does, with these descriptors."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(handover.place_of(state_file)))
        listener.listen(1)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                socket.send_fds(connection, [names], numbers)
                connection.recv(100)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield
        thread.join(10)


def test_descriptor_that_is_no_socket_is_refused_and_closed(
    state_file: str, tmp_path: Path
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with (tmp_path / "file").open("w") as file, socket.create_server(("127.0.0.1", 0)) as good:
        passed = [good.fileno(), file.fileno(), good.fileno()]
        with (
            answering(state_file, b"extproc\nextproc\nadmin", passed),
            pytest.raises(StartError, match="passes on what is no socket"),
        ):
            take_over(state_file, NOWHERE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("what", ["another port", "another host", "connected", "datagrams", "name"])
def test_sockets_that_are_not_bound_to_the_configured_address_are_not_taken(
    state_file: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as held:
        kind = socket.SOCK_DGRAM if what == "datagrams" else socket.SOCK_STREAM
        one = held.enter_context(socket.socket(type=kind))
        one.bind(("127.0.0.2" if what == "another host" else "127.0.0.1", 0))
        if what not in ("datagrams", "connected"):
            one.listen(1)
        port = one.getsockname()[1] + (what == "another port")
        listen = {"other" if what == "name" else "extproc": f"127.0.0.1:{port}"}
        held.enter_context(answering(state_file, b"extproc", [one.fileno()]))
        before = take_over(state_file, listen)
        assert before is not None
        assert not before.sockets
        before.close()
    assert "is not taken over" in caplog.text


def test_unix_socket_is_taken_by_its_path(state_file: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "extproc.sock"))
        one.listen(1)
        with answering(state_file, b"extproc", [one.fileno()]):
            before = take_over(state_file, {"extproc": f"unix:{tmp_path}/extproc.sock"})
            assert before is not None
            assert [one.family for one in before.sockets["extproc"]] == [socket.AF_UNIX]
            before.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run a process as another user")
@pytest.mark.parametrize("owner", [NOBODY, 0])
def test_nothing_is_taken_from_a_process_of_another_user(
    state_file: str, tmp_path: Path, owner: int
) -> None:
    tmp_path.chmod(0o777)
    for one in tmp_path.parents[:-2]:
        one.chmod(0o755)
    if not (child := os.fork()):
        listener = socket.socket(socket.AF_UNIX)
        os.seteuid(owner)
        listener.bind(str(handover.place_of(state_file)))
        os.seteuid(0)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        listener.listen(1)
        listener.accept()[0].recv(100)
        os._exit(0)
    try:
        blocked_until(handover.place_of(state_file).exists, "the other process listens")
        blocked_until(lambda: is_refused(state_file), "its answer is refused")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def is_refused(state_file: str) -> bool:
    """Whether another user's process is refused; False while it does not listen yet."""
    try:
        return take_over(state_file, NOWHERE) is not None
    except StartError as error:
        return f"user {NOBODY}" in str(error)
