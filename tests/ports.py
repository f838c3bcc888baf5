"""Ports for servers that a test starts, and starts again."""

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator

from extproc.base.address import PORT_STEP

# Below the ports that the system gives to outgoing connections (from 32768 on): nothing takes one
# while its server is down. Concurrent runs begin at different ports, and the processes of one run
# take turns.
_FIRST, _COUNT = 20_000, 12_000


def _numbers() -> Iterator[int]:
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    run = os.getppid() if processes > 1 else os.getpid()
    return itertools.count(run * 331 + process, processes)


_NUMBERS = _numbers()
_KEPT: set[int] = set()  # given out before their turn


def free_port() -> int:
    """A loopback TCP port that nobody listens on, and that was not given out before."""
    while True:
        port = _FIRST + next(_NUMBERS) % _COUNT
        if port in _KEPT:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def free_ports_apart(count: int, step: int = PORT_STEP) -> int:
    """The first of `count` ports that are free now, each `step` above the one before."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for number in range(1, count):
                place = ("127.0.0.1", first + step * number)
                held.enter_context(socket.create_server(place))
            _KEPT.update(range(first, first + step * count, step))
            return first
