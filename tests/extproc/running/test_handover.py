"""A router passes state and sockets on; whatever goes wrong, it goes on itself."""

import asyncio
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from extproc.base.errors import StartError
from extproc.running import handover
from extproc.running.handover import Handover, take_over
from tests.waiting import until


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


@pytest.fixture
def listeners() -> Iterator[dict[str, list[socket.socket]]]:
    names = ("extproc", "extproc", "admin")
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
    before = await asyncio.to_thread(take_over, state_file)
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
        await asyncio.to_thread(take_over, state_file)
    assert (router.written, router.stopped) == (0, 0)
    await router.handover.close()


async def test_successor_that_ends_before_it_serves_changes_nothing(
    state_file: str, router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # the router can be taken over again
        before = await asyncio.to_thread(take_over, state_file)
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
    assert take_over(state_file) is None
    with socket.socket(socket.AF_UNIX) as killed:  # its router was killed
        killed.bind(str(handover.place_of(state_file)))
    assert take_over(state_file) is None
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
    before = await asyncio.to_thread(take_over, state_file)
    assert before is not None
    await router.handover.close()
    await before.end()
    before.close()
    assert "has gone" in caplog.text
