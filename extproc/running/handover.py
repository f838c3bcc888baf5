"""An upgrade in place: a new router takes state and listening sockets from the one that runs.

The running one listens on a Unix socket beside its state file. A new one of the same user connects
and asks; the running one writes its state file and passes its listening sockets (SCM_RIGHTS of
unix(7)). Both accept connections from then on, as the sockets are the same, until the new one says
that it serves; then the old one stops as by SIGTERM. If the new one ends before that, nothing has
changed. So no connection is refused, and no request is decided by a router that knows nothing. Each
of them looks at whose process is at the other end (SO_PEERCRED of unix(7)).

    new: b"kvsteer 1"    old: a line of names, one for each socket, with the sockets
    new: b"ready"        old: closes the connection
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from extproc.base.errors import StartError
from extproc.base.other_end import user_of
from extproc.serving.listening import is_bound_to

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


def take_over(state_file: str, listen: Mapping[str, str]) -> Predecessor | None:
    """Takes over from the router that runs with this state file; None if there is none. Blocks.

    Only a process of this one's user is taken for it: another's would keep the sockets, and read
    and answer what proxies ask. Sockets that are not bound as this router is configured are left to
    the running one.

    listen: the configured addresses, by their section.

    Raises:
        StartError: there is one, but it is another user's, or passes nothing on.
    """
    path = place_of(state_file)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ANSWER_SECONDS)
        try:
            owner = path.lstat().st_uid
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            log.info("take-over: no router listens at %s: this one starts as usual", path)
            return None
        _require_own(path, owner, user_of(connection))
        connection.sendall(_HELLO)
        names, numbers, _, _ = socket.recv_fds(connection, _MAX_BYTES, MAX_SOCKETS)
        sockets = _sockets_of(path, names, numbers, listen)
    except OSError as error:
        connection.close()
        raise StartError(f"take-over: {path}: {error.strerror or 'no answer'}") from None
    except StartError:
        connection.close()
        raise
    log.info(
        "take-over: got %d listening sockets from the running router",
        sum(map(len, sockets.values())),
    )
    return Predecessor(connection, sockets)


def _require_own(path: Path, *users: int) -> None:
    """Checks that the socket, and the process that listens at it, are this user's.

    Raises:
        StartError: they are not.
    """
    for user in users:
        if user != os.geteuid():
            raise StartError(
                f"take-over: {path} belongs to user {user}, as no router of this one's"
            )


def _sockets_of(
    path: Path, names: bytes, numbers: Sequence[int], listen: Mapping[str, str]
) -> Sockets:
    """Returns the passed sockets that are bound as configured, by section; closes the others.

    Raises:
        StartError: none were passed, or what is no socket; all are closed.
    """
    passed = _opened(path, numbers)
    listed = names.decode("ascii", "replace").split()
    if not passed or len(listed) != len(passed):
        for one in passed:
            one.close()
        raise StartError(f"take-over: {path}: the running router passes no sockets on")
    sockets: dict[str, list[socket.socket]] = {}
    for name, one in zip(listed, passed, strict=True):
        if name in listen and is_bound_to(one, listen[name]):
            one.setblocking(False)
            sockets.setdefault(name, []).append(one)
        else:
            one.close()
            log.warning("take-over: a socket for %.20s.listen is not taken over", name)
    return sockets


def _opened(path: Path, numbers: Sequence[int]) -> list[socket.socket]:
    """Returns sockets of these descriptors.

    Raises:
        StartError: one is of something else; all are closed.
    """
    opened: list[socket.socket] = []
    try:
        for number in numbers:
            opened.append(socket.socket(fileno=number))  # noqa: PERF401 - it may fail half-way
    except OSError:
        for one in opened:
            one.close()
        for number in numbers[len(opened) :]:
            os.close(number)
        raise StartError(f"take-over: {path} passes on what is no socket") from None
    return opened


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
        if user_of(connection) != self._user:
            log.warning("take-over: refused a process of user %d", user_of(connection))
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
