"""Messages between routers on one host, without any engine: datagrams in a directory.

Each router has a socket of its own in the directory and sends to all others that it finds there.
Who may write there is who may tell them anything, and the messages are sealed besides. A socket
that nobody reads any more is removed by whoever meets it.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from extproc.sharing.engine import CONNECTING
from extproc.sharing.messages import MAX_BYTES

SUFFIX = ".router"

# How often it is looked for new routers, and tried again what failed, in seconds.
LOOK_SECONDS = 0.5

# More are not sent to.
MAX_PEERS = 64

# Datagrams that are read before others get their turn.
AT_ONCE = 16


class Datagrams:
    """One router's socket in a directory; what it tells goes to all others there.

    hear: takes each message, and returns for how many seconds no more of them are wanted. opened:
    is called when messages begin to arrive. fault: why nothing can be told now, "" if it can.
    lost: messages that a router did not take.
    """

    def __init__(
        self, directory: str, hear: Callable[[bytes], float], opened: Callable[[], None]
    ) -> None:
        self._directory = Path(directory)
        self._hear = hear
        self._opened = opened
        self._path = self._directory / f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        self._socket: socket.socket | None = None
        self._peers: list[str] = []
        self._looked_at = 0.0
        self.lost = 0
        self.fault = CONNECTING

    async def run(self) -> None:
        """Keeps the socket until it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    own = self._open()
                except OSError as error:
                    self.fault = f"{self._directory}: {error.strerror or error}"
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                loop.add_reader(own, self._read, own)
                self._socket, self.fault = own, ""
                self._opened()
                while self._is_there():  # noqa: ASYNC110 - nobody tells when a file goes
                    await asyncio.sleep(LOOK_SECONDS)
                self._close()
        finally:
            self._close()

    async def tell(self, messages: Sequence[bytes]) -> bool:
        """Sends messages to every other router that takes them now."""
        own, now = self._socket, time.monotonic()
        if own is None:
            return False
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at, self._peers = now, self._found()
        for peer in list(self._peers):
            for message in messages:
                try:
                    own.sendto(message, peer)
                except (ConnectionRefusedError, FileNotFoundError):
                    self._peers.remove(peer)
                    _remove(peer)  # its router ended without a chance to do so
                    break
                except OSError:  # it does not keep up; what it misses it asks for
                    self.lost += 1
        return True

    def _open(self) -> socket.socket:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            own.bind(str(self._path))
            self._path.chmod(0o600)
        except OSError:
            own.close()
            raise
        return own

    def _is_there(self) -> bool:
        try:
            return self._path.exists()
        except OSError:  # the directory may not be looked into any more
            return False

    def _found(self) -> list[str]:
        """The sockets of all others."""
        try:
            found = sorted(self._directory.glob(f"*{SUFFIX}"))
        except OSError:
            return []
        return [str(path) for path in found if path != self._path][:MAX_PEERS]

    def _read(self, own: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                message = own.recv(MAX_BYTES + 1)
            except OSError:
                return
            seconds = self._hear(message)
            if seconds:
                loop = asyncio.get_running_loop()
                loop.remove_reader(own)
                loop.call_later(seconds, self._resume, own)
                return

    def _resume(self, own: socket.socket) -> None:
        if own is self._socket:
            asyncio.get_running_loop().add_reader(own, self._read, own)

    def _close(self) -> None:
        own, self._socket = self._socket, None
        if own is not None:
            asyncio.get_running_loop().remove_reader(own)
            own.close()
            _remove(self._path)


def _remove(path: str | Path) -> None:
    """Removes a socket; where that cannot be done, somebody else took its directory away."""
    with contextlib.suppress(OSError):
        Path(path).unlink()
