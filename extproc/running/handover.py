"""An upgrade in place: a new router takes state and listening sockets from the one that runs.

The running one listens on a Unix socket beside its state file. A new one of the same user connects
and asks; the running one writes its state file and passes its listening sockets (SCM_RIGHTS of
unix(7)). Both accept connections from then on, as the sockets are the same, until the new one says
that it serves; then the old one stops as by SIGTERM. If the new one ends before that, nothing has
changed. So no connection is refused, and no request is decided by a router that knows nothing.

    new: b"kvsteer 1"    old: a line of names, one for each socket, with the sockets
    new: b"ready"        old: closes the connection
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from extproc.base.errors import StartError

log = logging.getLogger("kvsteer.state")

_HELLO, _READY = b"kvsteer 1", b"ready"

# How long the running router may take to write its state, and the new one to serve after that.
ANSWER_SECONDS = 60.0
SERVE_SECONDS = 120.0

MAX_SOCKETS = 32
_MAX_BYTES = 4_096

Sockets = Mapping[str, Sequence[socket.socket]]


def place_of(state_file: str) -> Path:
    """Returns where a router with this state file listens for its successor."""
    return Path(f"{state_file}.sock")


class Predecessor:
    """The router that runs until now, from the side of the new one.

    sockets: its listening sockets, by the section of their address.
    """

    def __init__(self, connection: socket.socket, sockets: Sockets) -> None:
        self.sockets = sockets
        self._connection = connection

    async def end(self) -> None:
        """Tells it that this router serves, so that it stops."""
        with self._connection as connection:
            try:
                await asyncio.to_thread(connection.sendall, _READY)
                await asyncio.to_thread(connection.recv, 1)  # until it has begun to stop
            except OSError as error:
                log.warning("take-over: the running router has gone: %s", error.strerror)

    def close(self) -> None:
        """Gives up: it goes on."""
        self._connection.close()
        for each in self.sockets.values():
            for one in each:
                one.close()


def take_over(state_file: str) -> Predecessor | None:
    """Takes over from the router that runs with this state file; None if there is none. Blocks.

    Raises:
        StartError: there is one, but it passes nothing on.
    """
    path = place_of(state_file)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            log.info("take-over: no router listens at %s: this one starts as usual", path)
            return None
        connection.sendall(_HELLO)
        names, numbers, _, _ = socket.recv_fds(connection, _MAX_BYTES, MAX_SOCKETS)
    except OSError as error:
        connection.close()
        raise StartError(f"take-over: {path}: {error.strerror or 'no answer'}") from None
    passed = [socket.socket(fileno=number) for number in numbers]
    listed = names.decode("ascii", "replace").split()
    if not passed or len(listed) != len(passed):
        for one in (connection, *passed):
            one.close()
        raise StartError(f"take-over: {path}: the running router passes no sockets on")
    for one in passed:
        one.setblocking(False)
    log.info("take-over: got %d listening sockets from the running router", len(passed))
    sockets = {
        name: [one for its, one in zip(listed, passed, strict=True) if its == name]
        for name in listed
    }
    return Predecessor(connection, sockets)


class Handover:
    """Waits for a successor, and passes state and sockets on to it.

    path: where it listens. write: writes the state file. sockets: returns the numbers of the
    listening sockets, by the section of their address. stop: called once a successor serves. user:
    whose processes may ask.
    """

    def __init__(
        self,
        path: Path,
        write: Callable[[], Awaitable[None]],
        sockets: Callable[[], Mapping[str, Sequence[int]]],
        stop: Callable[[], None],
        user: int | None = None,
    ) -> None:
        self._user = os.geteuid() if user is None else user
        self._path = path
        self._write = write
        self._sockets = sockets
        self._stop = stop
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_over = False

    def start(self) -> None:
        """Listens; if it cannot, a successor cannot take over, which is logged."""
        new = self._path.with_name(f"{self._path.name}.new")
        made = socket.socket(socket.AF_UNIX)
        try:
            new.unlink(missing_ok=True)
            before = os.umask(0o177)
            try:
                made.bind(str(new))
            finally:
                os.umask(before)
            made.listen(1)
            new.replace(self._path)  # a predecessor's goes
        except OSError as error:
            made.close()
            log.warning("take-over: cannot listen at %s: %s", self._path, error.strerror or error)
            return
        made.setblocking(False)
        self._listener = made
        self._task = asyncio.create_task(self._run(made))

    async def close(self) -> None:
        """Stops listening."""
        if self._task is None or self._listener is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._listener.close()
        if not self.is_over:
            with contextlib.suppress(OSError):
                self._path.unlink()

    async def _run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while not self.is_over:
            connection, _ = await loop.sock_accept(listener)
            with connection:
                connection.setblocking(False)
                try:
                    await self._serve(connection)
                except (OSError, TimeoutError) as error:
                    log.warning("take-over: the other router ended or was too slow: %r", error)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if _user_of(connection) != self._user:
            log.warning("take-over: refused a process of user %d", _user_of(connection))
            return
        async with asyncio.timeout(SERVE_SECONDS):
            if await loop.sock_recv(connection, len(_HELLO)) != _HELLO:
                log.warning("take-over: refused a router of another version")
                return
            log.info("take-over: another router takes over")
            await self._write()
            passed = [(name, one) for name, each in self._sockets().items() for one in each]
            names = "\n".join(name for name, _ in passed).encode()
            socket.send_fds(connection, [names], [number for _, number in passed])
            said = await loop.sock_recv(connection, len(_READY))
        if said != _READY:
            log.warning("take-over: the other router ended before it served: this one goes on")
            return
        self.is_over = True
        self._stop()


def _user_of(connection: socket.socket) -> int:
    """Returns the user of the process at the other end (SO_PEERCRED of unix(7))."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", raw)[1]
    return user
