"""Ports for servers that a test starts, and starts again."""

import itertools
import os
import socket

# Below those that the system gives to outgoing connections (from 32768 on): nothing takes one
# while its server is away. Runs beside each other begin at different ones.
_FIRST, _COUNT = 20_000, 12_000
_numbers = itertools.count(os.getpid() * 331)


def free_port() -> int:
    """A loopback TCP port that nobody listens on, and that was not given out before."""
    while True:
        port = _FIRST + next(_numbers) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
