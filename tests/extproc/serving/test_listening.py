"""Where servers listen, and what they replace there."""

import socket
from pathlib import Path

import pytest

from extproc.config.schema import ExtProc
from extproc.errors import StartError
from extproc.serving.listening import try_address
from tests.extproc.serving.running import Running
from tests.ports import free_port


@pytest.mark.parametrize("kind", ["grpcio", "lean"])
async def test_a_taken_port_is_told(kind: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        one = Running(f"127.0.0.1:{taken.getsockname()[1]}", kind)
        with pytest.raises(StartError, match=r"extproc\.listen: .*: Address already in use"):
            await one.server.start()
        await one.stop()


@pytest.mark.parametrize("kind", ["grpcio", "lean"])
@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("unix:/nowhere/at/all", "No such file or directory"),
        ("192.0.2.1:9002", "Cannot assign requested address"),
    ],
)
async def test_why_an_address_cannot_be_had_is_told(kind: str, listen: str, why: str) -> None:
    one = Running(listen, kind)
    with pytest.raises(StartError) as caught:
        await one.server.start()
    assert str(caught.value) == f"extproc.listen: cannot listen on {listen}: {why}"
    await one.stop()


def test_a_look_at_an_address_leaves_nothing_behind(tmp_path: Path) -> None:
    for listen in (f"unix:{tmp_path}/socket", f"127.0.0.1:{free_port()}"):
        options = ExtProc(listen=listen)
        try_address(options)
        try_address(options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["grpcio", "lean"])
async def test_a_socket_left_behind_is_replaced_but_nothing_else(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    one = Running(f"unix:{path}", kind)
    await one.server.start()
    another = Running(f"unix:{path}", kind)
    with pytest.raises(StartError, match="another server listens"):
        await another.server.start()
    await another.stop()
    assert path.exists()
    await one.stop()
    file = tmp_path / "file"
    file.write_text("precious")
    third = Running(f"unix:{file}", kind)
    with pytest.raises(StartError, match="is no socket"):
        await third.server.start()
    await third.stop()
    assert file.read_text() == "precious"
