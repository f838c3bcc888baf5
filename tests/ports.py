"""Ports for servers that a test starts, and starts again."""

import contextlib
import fcntl
import itertools
import os
import socket
import tempfile
from pathlib import Path

from extproc.base.address import PORT_STEP

# Below the ports that the system gives to outgoing connections (from 32768 on): nothing takes one
# while its server is down. Processes begin at different ports.
_FIRST, _COUNT = 20_000, 12_000
_START = os.getpid() * 331
_PLACES = itertools.cycle(range(_COUNT))
_KEPT: set[int] = set()  # places that were given out before their turn

# A byte for each port, which the process that gave the port out has locked until it ends. A program
# that a test starts may give out ports as well, and has a lock of its own.
_TAKEN = os.open(
    Path(tempfile.gettempdir()) / f"kvsteer-test-ports-{os.getuid()}",
    os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
    0o600,
)


def _port_at(place: int) -> int:
    return _FIRST + (_START + place) % _COUNT


def _is_ours(port: int) -> bool:
    """Takes a port for this process; says whether no other process has it."""
    with contextlib.suppress(OSError):
        fcntl.lockf(_TAKEN, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        return True
    return False


def _free_place() -> int:
    while True:
        place = next(_PLACES)
        if place in _KEPT or not _is_ours(_port_at(place)):
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", _port_at(place)))
            return place


def free_port() -> int:
    """A loopback TCP port that nobody listens on, and that no process of the tests was given."""
    return _port_at(_free_place())


def free_ports_apart(count: int, step: int = PORT_STEP) -> int:
    """The first of `count` ports that are free now, each `step` above the one before."""
    while True:
        first = _free_place()
        others = range(first + step, first + step * count, step)
        ports = [_port_at(place) for place in others]
        if others.stop > _COUNT or max(ports) - _port_at(first) != step * (count - 1):
            continue  # beyond the end of the range
        if not all(map(_is_ours, ports)):
            continue
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in ports:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            _KEPT.update(others)
            return _port_at(first)
