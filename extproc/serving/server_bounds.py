"""Bounds of a server's connections."""

from typing import NamedTuple

# How long a peer may take to read why its connection ends, and to close TLS.
LINGER_SECONDS = 1.0


class ServerBounds(NamedTuple):
    """What a server allows its peers.

    max_connections: open at once; an Envoy opens one for each worker thread. Beyond it, idle ones
    are closed. It is lower if the system allows few open files. max_handshakes: of TLS at once, or
    half of the connections if that is less; one takes milliseconds, and meanwhile holds 80 KiB on
    uvloop, 1 MiB on asyncio's own loop. handshake_seconds: for one. tick_seconds: between checks
    for stalls. linger_seconds: for a peer to read why its connection ends. end_seconds: how long
    the ends of successful streams are kept back, to be written together with an answer: they are
    not urgent, and each would be its own write; an Envoy waits a second for them, or not at all.
    max_bytes: of unfinished messages and waiting answers; None to derive it from the largest
    message.
    """

    max_connections: int = 4096
    max_handshakes: int = 200
    handshake_seconds: float = 10.0
    tick_seconds: float = 5.0
    linger_seconds: float = LINGER_SECONDS
    end_seconds: float = 0.005
    max_bytes: int | None = None


USUAL = ServerBounds()
