import os
import socket
import subprocess
import sys

import pytest

from kvtools.demo.port_holder import holder_of
from tests.ports import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_holder_is_the_process_that_listens(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"{host} is not there")
    with server:
        holder = holder_of(server.getsockname()[1])
    assert holder is not None
    assert holder.pid == os.getpid()
    assert str(holder).startswith(f"process {os.getpid()} (")


def test_port_where_nobody_listens_has_no_holder() -> None:
    assert holder_of(free_port()) is None


def test_command_is_shown_short_and_without_control_characters() -> None:
    port = free_port()
    listens = f"import socket, sys; s = socket.create_server(('127.0.0.1', {port})); print()"
    command = [sys.executable, "-c", f"{listens}; sys.stdout.flush(); sys.stdin.read()"]
    with subprocess.Popen(
        [*command, "\x1b[2J" * 100], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        holder = holder_of(port)
        other.communicate()
    assert holder is not None
    assert holder.command.isprintable()
    assert len(holder.command) < 100
