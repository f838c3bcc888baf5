"""Where servers listen, and what they replace there."""

import socket
from pathlib import Path

import pytest

from extproc.errors import StartError
from tests.extproc.serving.running import Running


@pytest.mark.parametrize("kind", ["grpcio", "lean"])
async def test_a_taken_port_is_told(kind: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        one = Running(f"127.0.0.1:{taken.getsockname()[1]}", kind)
        with pytest.raises(StartError, match=r"extproc\.listen: cannot listen on"):
            await one.server.start()
        await one.stop()


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
