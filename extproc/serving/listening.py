"""What both servers share: listening, limits, Unix sockets, and TLS handshakes."""

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import socket
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from extproc.base import address
from extproc.base.errors import StartError
from extproc.config.schema import Config, ExtProc
from extproc.serving.certificates import Certificates, ChangingContext
from extproc.serving.server_bounds import USUAL, ServerBounds

log = logging.getLogger("kvsteer.extproc")

# Room in a message besides the body: headers, which Envoy limits to 60 KiB by default.
_MESSAGE_OVERHEAD_BYTES = 1024 * 1024

# TCP keepalive: after a minute without a byte, six probes ten seconds apart: two minutes in all.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))

_ALL_RIGHTS = 0o777

# How many connections the system accepts ahead of the server.
BACKLOG = 128

# Pause before accepting again if the system can open no more files.
_NO_FILES_SECONDS = 1.0


# Shares of the allowed open files: for proxies' connections, and for those of each HTTP server. The
# rest is for feeds, requests to workers, and files.
_PROXIES_SHARE = 3 / 4
_HTTP_SHARE = 1 / 16


def raise_file_limit() -> tuple[int, int]:
    """Raises the limit of open files as far as the system allows; returns the old and new one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def proxy_connections() -> int:
    """Returns how many proxy connections are allowed, to leave open files for the rest."""
    return _share(_PROXIES_SHARE)


def http_connections() -> int:
    """Returns how many connections each HTTP server may have at once."""
    return min(256, _share(_HTTP_SHARE))


def _share(share: float) -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, int(limit * share)) if limit != resource.RLIM_INFINITY else sys.maxsize


def max_message_bytes(config: Config) -> int:
    """Returns the largest accepted gRPC message in bytes, with room for Envoy's largest body.

    A body that is too long to be read is still routed, by load."""
    limit = max(config.extproc.max_body_bytes, config.envoy.request_body_buffer_limit_bytes)
    return limit + _MESSAGE_OVERHEAD_BYTES


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Makes the system detect that the other machine is gone, also during a long response."""
    connected = transport.get_extra_info("socket")
    if connected is not None and connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def socket_path(options: ExtProc) -> Path | None:
    """Returns the path of the Unix socket to listen on, None for a host and a port."""
    return _path_in(options.listen) if options.listen.startswith(address.UNIX_PREFIX) else None


def _path_in(listen: str) -> Path:
    """Returns the path in unix:PATH; gRPC also writes unix:///absolute/path."""
    return Path(listen.removeprefix(address.UNIX_PREFIX).removeprefix("//"))


@contextlib.contextmanager
def place_for(path: Path, options: ExtProc) -> Iterator[None]:
    """Prepares a path for binding a Unix socket: removes a stale one and sets the file mode.

    Raises:
        StartError: the path is taken.
    """
    with _alone_in(path.parent):
        remove_stale_socket(path)
        before = os.umask(_ALL_RIGHTS & ~int(options.socket_mode, 8))
        try:
            yield
        finally:
            os.umask(before)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Makes other routers that start listening in a directory wait, if it can be locked.

    Between binding and listening, a socket looks like one that a killed router left behind, and
    another router would replace it.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def bound_socket(path: Path, options: ExtProc) -> socket.socket:
    """Returns a Unix socket that listens at a path.

    Raises:
        StartError: the path is taken.
        OSError: the socket cannot be created there.
    """
    with place_for(path, options):
        made = socket.socket(socket.AF_UNIX)
        try:
            made.bind(str(path))
            made.listen(BACKLOG)
        except OSError:
            made.close()
            raise
    return made


def cannot_listen(key: str, listen: str, error: OSError) -> StartError:
    """Returns an error with the system's reason why an address cannot be used.

    key: its configuration key.
    """
    # asyncio wraps the system's words in its own; an unknown host name has a negative number
    number = error.errno or 0
    why = os.strerror(number) if number > 0 else error.strerror or str(error)
    return StartError(f"{key}: cannot listen on {listen}: {why}")


def listening_sockets(listen: str, backlog: int = BACKLOG) -> list[socket.socket]:
    """Returns sockets that listen on a host and a port, one for each address of the host.

    Raises:
        OSError: one of the addresses cannot be bound.
    """
    host, port = address.parse(listen)
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    with contextlib.ExitStack() as undoing:
        sockets = []
        for family, _, proto, _, place in socket.getaddrinfo(host, port, type=kind, flags=flags):
            made = undoing.enter_context(socket.socket(family, kind, proto))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # the other family has its own socket
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind(place)
            made.listen(backlog)
            made.setblocking(False)
            sockets.append(made)
        undoing.pop_all()
        return sockets


def is_bound_to(one: socket.socket, listen: str) -> bool:
    """Returns whether a socket listens at an address as the configuration writes it."""
    if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    if listen.startswith(address.UNIX_PREFIX):
        return one.family == socket.AF_UNIX and one.getsockname() == str(_path_in(listen))
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    host, port = address.parse(listen)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    here = one.family, *one.getsockname()[:2]
    return any(here == (family, *place[:2]) for family, _, _, _, place in found)


def remove_stale_socket(path: Path) -> None:
    """Removes the socket of a killed router, but no socket in use and no other file.

    Raises:
        StartError: the path is taken.
    """
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise StartError(f"extproc.listen: {path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise StartError(f"extproc.listen: another server listens on {path}")
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StartError(f"extproc.listen: {path}: {error.strerror}") from None


class TlsListener:
    """Accepts TLS connections, and counts each handshake from its start.

    asyncio's own server does not report unfinished handshakes, so silent connections would escape
    every limit.

    has_room: whether to accept one more connection. protocol: creates a connection's protocol.
    """

    def __init__(
        self,
        certificates: Certificates,
        has_room: Callable[[], bool],
        protocol: Callable[[], asyncio.Protocol],
        bounds: ServerBounds = USUAL,
    ) -> None:
        self._certificates = certificates
        self._bounds = bounds
        self._context = ChangingContext(certificates)
        self._has_room = has_room
        self._protocol = protocol
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        # oldest first; each with its socket until a transport owns that
        self._shaking: dict[asyncio.Task[None], socket.socket | None] = {}
        self._hosts: dict[asyncio.Task[None], str] = {}  # at their other ends

    async def start(self, listen: str, inherited: Sequence[socket.socket] = ()) -> None:
        """Starts listening.

        inherited: sockets that listen already, instead of the address.

        Raises:
            OSError: the address cannot be bound.
        """
        self._sockets = list(inherited) or await asyncio.to_thread(listening_sockets, listen)
        self._accepting = [asyncio.create_task(self._accept(one)) for one in self._sockets]

    def listening(self) -> list[int]:
        """Returns the numbers of the listening sockets."""
        return [one.fileno() for one in self._sockets]

    @property
    def handshakes(self) -> int:
        """How many handshakes are running."""
        return len(self._shaking)

    def drop_oldest(self) -> bool:
        """Ends the oldest handshake of the address that has most; returns False if none is running.

        Not the newest one, since an honest handshake ends before many others have begun.
        """
        if not self._shaking:
            return False
        ((host, _),) = Counter(self._hosts.values()).most_common(1)
        task = next(task for task in self._shaking if self._hosts[task] == host)
        self._certificates.note_unfinished("too many at once, and this was the oldest")
        self._forget(task)
        task.cancel()
        return True

    async def close(self) -> None:
        """Stops listening, and ends the running handshakes: they have no requests yet."""
        tasks = [*self._accepting, *self._shaking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self._sockets:
            one.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, other_end = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(_NO_FILES_SECONDS)
                continue
            if self._has_room():
                self._begin(connected, str(other_end[0]))
            else:
                connected.close()
            await asyncio.sleep(0)  # sock_accept does not yield while connections are waiting

    def _begin(self, connected: socket.socket, host: str) -> None:
        half = max(1, proxy_connections() // 2)
        if self.handshakes >= min(self._bounds.max_handshakes, half):
            self.drop_oldest()
        task = asyncio.create_task(self._shake_hands(connected))
        self._shaking[task] = connected
        self._hosts[task] = host
        task.add_done_callback(self._forget)

    async def _shake_hands(self, connected: socket.socket) -> None:
        task = asyncio.current_task()
        if task in self._shaking:
            self._shaking[task] = None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connected,
                ssl=self._context,
                ssl_handshake_timeout=self._bounds.handshake_seconds,
                ssl_shutdown_timeout=self._bounds.linger_seconds,
            )
        except ConnectionAbortedError:
            seconds = self._bounds.handshake_seconds
            self._certificates.note_unfinished(f"not finished after {seconds:g} s")
        except OSError as error:  # a TLS error, which the context reports
            log.debug("TLS handshake failed: %s", error)

    def _forget(self, task: asyncio.Task[None]) -> None:
        connected = self._shaking.pop(task, None)
        self._hosts.pop(task, None)
        if connected is not None:  # dropped before the handshake began
            connected.close()
