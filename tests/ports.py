"""Ports for servers that a test starts, and starts again."""

import contextlib
import itertools
import os
import socket

from extproc.base.address import PORT_STEP

# Below the ports that the system gives to outgoing connections (from 32768 on): nothing takes one
# while its server is down. Concurrent runs begin at different ports, and each process of a run has
# a range of its own.
_FIRST, _COUNT = 20_000, 12_000


def _own_range() -> tuple[int, int]:
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    run = os.getppid() if processes > 1 else os.getpid()
    size = _COUNT // processes
    return run * 331 + process * size, size


_START, _SIZE = _own_range()
_PLACES = itertools.cycle(range(_SIZE))
_KEPT: set[int] = set()  # places in the range that were given out before their turn


def _port_at(place: int) -> int:
    return _FIRST + (_START + place) % _COUNT


def _free_place() -> int:
    while True:
        place = next(_PLACES)
        if place in _KEPT:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", _port_at(place)))
            return place


def free_port() -> int:
    """A loopback TCP port that nobody listens on, and that was not given out before."""
    return _port_at(_free_place())


def free_ports_apart(count: int, step: int = PORT_STEP) -> int:
    """The first of `count` ports that are free now, each `step` above the one before."""
    while True:
        first = _free_place()
        others = range(first + step, first + step * count, step)
        ports = [_port_at(place) for place in others]
        if others.stop > _SIZE or max(ports) - _port_at(first) != step * (count - 1):
            continue  # beyond the end of a range
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in ports:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            _KEPT.update(others)
            return _port_at(first)
