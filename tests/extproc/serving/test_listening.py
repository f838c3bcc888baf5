"""Where servers listen, and what they replace there."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from extproc.base.errors import StartError
from extproc.config.schema import ExtProc
from extproc.serving.listening import bound_socket
from tests.extproc.serving.running import Running


async def test_start_error_names_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        one = Running(f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(StartError, match=r"extproc\.listen: .*: Address already in use"):
            await one.server.start()
        await one.stop()


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("unix:/nowhere/at/all", "No such file or directory"),
        ("192.0.2.1:9002", "Cannot assign requested address"),
    ],
)
async def test_start_error_names_the_address_and_fault(listen: str, why: str) -> None:
    one = Running(listen)
    with pytest.raises(StartError) as caught:
        await one.server.start()
    assert str(caught.value) == f"extproc.listen: cannot listen on {listen}: {why}"
    await one.stop()


async def test_bound_socket_replaces_a_dead_socket_only(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    one = Running(f"unix:{path}")
    await one.server.start()
    another = Running(f"unix:{path}")
    with pytest.raises(StartError, match="another server listens"):
        await another.server.start()
    await another.stop()
    assert path.exists()
    await one.stop()
    file = tmp_path / "file"
    file.write_text("precious")
    third = Running(f"unix:{file}")
    with pytest.raises(StartError, match="is not a socket"):
        await third.server.start()
    await third.stop()
    assert file.read_text() == "precious"


def test_bound_socket_succeeds_once_for_routers_that_start_at_once(tmp_path: Path) -> None:
    options = ExtProc(listen=f"unix:{tmp_path}/socket")
    start = threading.Barrier(8)

    def listen(_: int) -> socket.socket | str:
        start.wait()
        try:
            return bound_socket(tmp_path / "socket", options)
        except StartError as error:
            return str(error)

    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(tmp_path / "socket"))
        with ThreadPoolExecutor(8) as starting:
            results = [*starting.map(listen, range(8))]
        (listener,) = (one for one in results if isinstance(one, socket.socket))
        refused = f"extproc.listen: another server listens on {tmp_path}/socket"
        assert results.count(refused) == 7
        listener.close()
        (tmp_path / "socket").unlink()
