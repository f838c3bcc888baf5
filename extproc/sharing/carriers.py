"""Carries messages between routers: through an engine (Valkey or Redis), or by datagrams on a host.

An engine distributes messages over one channel and keeps none. One connection both publishes and
subscribes (RESP3). The engine confirms each published message, so a stopped engine is noticed at
the next tick, not by a timeout of TCP. Nothing is published while a reply is overdue, so nothing
queues up.

Datagrams need no engine: each router has its own socket in a directory and sends to all others
there. Only users who may write there can send messages, which are sealed as well. A socket without
a reader is removed by the first router that finds it.
"""

import asyncio
import contextlib
import os
import random
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from extproc.base import address
from extproc.base.address import Rendezvous
from extproc.base.errors import importing_extra
from extproc.base.secret_file import secret_in
from extproc.config.sections import SharingSettings
from extproc.sharing.messages import MAX_BYTES
from kvstate.feeds.backoff import Backoff

if TYPE_CHECKING:
    from valkey.asyncio.connection import AbstractConnection

# Time limit for a connection, including TLS and the greeting.
CONNECT_SECONDS = 1.0

# If a reply takes longer than this, the connection is made again.
DEAD_SECONDS = 3.0

# Pauses between attempts: the first, and the longest.
FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 2.0

# Most characters of an engine's error that are shown.
MAX_WORDS = 120

# Most bytes of an answer or message that is not complete; routers send much shorter ones.
MAX_UNREAD_BYTES = 4 * 1024 * 1024

# Most pieces, of 64 KiB at most, in which the answers to the greeting may arrive.
MAX_GREETING_READS = 32

_NO_MORE = object()

CONNECTING = "not connected yet"


class ValkeyAccess(NamedTuple):
    """How a Valkey server is reached. ca: a PEM file, "" for the system's authorities."""

    rendezvous: Rendezvous
    channel: str
    username: str = ""
    password: str = ""
    ca: str = ""


class ValkeyConnection:
    """A connection to a Valkey server, made again whenever it is lost.

    The client library signs on. Then this class reads the bytes as they arrive: waking up a task
    for each message would cost as much as handling it.

    hear: receives each message of the channel, including this router's own, and returns how many
    seconds to pause before the next. opened: called when messages begin to arrive. answer_seconds:
    after this time without a reply, the server counts as down. connect_seconds: for the sign-on.
    fault: why nothing can be sent now, "" if messages can be sent.

    Raises:
        ExtraError: the client library is not installed.
    """

    def __init__(
        self,
        access: ValkeyAccess,
        hear: Callable[[bytes], float],
        opened: Callable[[], None],
        answer_seconds: float,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        with importing_extra("sharing.url", "sharing"):
            import libvalkey
            import valkey.asyncio
        self._timeouts = (TimeoutError, valkey.TimeoutError)
        self._packed = libvalkey.pack_command
        self._access = access
        self._connect_seconds = connect_seconds
        self._hear = hear
        self._opened = opened
        self._answer_seconds = answer_seconds
        self._retries = Backoff(FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, random.random)
        self._line: _Line | None = None
        self._unanswered: deque[float] = deque()
        self._logged_at = 0.0
        self.fault = CONNECTING

    async def run(self) -> None:
        """Keeps the connection until it is cancelled."""
        while True:
            try:
                await self._listen()
            except Exception as error:  # noqa: BLE001 - whatever it is, the router goes on alone
                self.fault = self._words(error)
            await asyncio.sleep(self._retries.next_seconds())

    def send(self, messages: Sequence[bytes]) -> bool:
        """Publishes messages if the engine accepts any now; returns whether it did."""
        line = self._line
        if line is None:
            return False
        now = time.monotonic()
        was_here, self._logged_at = now - self._logged_at < self._answer_seconds / 2, now
        # if this process itself paused, the reply may have arrived but not have been read yet
        if was_here and self._unanswered and now - self._unanswered[0] > self._answer_seconds:
            self.fault = "the server at sharing.url does not answer"
            if now - self._unanswered[0] > DEAD_SECONDS:
                line.end(TimeoutError())
            return False
        if line.unsent_bytes() > MAX_BYTES:
            self.fault = "the server at sharing.url does not keep up"
            return False
        for message in messages:
            self._unanswered.append(now)
            line.write(self._packed(("PUBLISH", self._access.channel, message)))
        return True

    async def _listen(self) -> None:
        connection = _connection(self._access, self._connect_seconds)
        try:
            async with asyncio.timeout(self._connect_seconds):
                await connection.connect()  # type: ignore[no-untyped-call]
                line = _Line(_transport(connection), self._hear, self._answered)
                line.write(self._packed(("SUBSCRIBE", self._access.channel)))
                await line.subscribed
            self._line = line
            self._opened()
            raise await line.ended
        finally:
            self._line = None
            self._unanswered.clear()
            await connection.disconnect(nowait=True)

    def _answered(self) -> None:
        """Notes that the engine accepted the oldest message that it had not confirmed.

        Raises:
            ConnectionError: it had confirmed all; an engine that answers without end would take as
                much time as it likes.
        """
        if not self._unanswered:
            raise ConnectionError("the server answers what it was not asked")
        self._unanswered.popleft()
        if self.fault:
            self.fault = ""
            self._retries.reset()
            self._opened()

    def _words(self, error: BaseException) -> str:
        """Returns the error's words, without parts that could contain a password."""
        said = " ".join(str(error).split())
        if isinstance(error, self._timeouts):
            said = "it does not answer in time"
        password = self._access.password
        return (said.replace(password, "***") if password else said)[:MAX_WORDS]


class _Line(asyncio.Protocol):
    """A connection to an engine, once the client library has signed on.

    hear: called for each message of the channel. answered: called for each published message that
    the engine confirms. subscribed: done when messages begin to arrive. ended: the reason why no
    more arrive.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        hear: Callable[[bytes], float],
        answered: Callable[[], None],
    ) -> None:
        import libvalkey

        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._hear = hear
        self._answered = answered
        self._reader = libvalkey.Reader(notEnoughData=_NO_MORE)
        self._unread_bytes = 0  # since the last complete answer or message
        self._is_paused = False
        self.subscribed: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[Exception] = self._loop.create_future()
        transport.set_protocol(self)

    def write(self, command: bytes) -> None:
        """Sends a command as soon as the network accepts it."""
        self._transport.write(command)

    def unsent_bytes(self) -> int:
        """Returns how many bytes the network has not accepted yet."""
        return self._transport.get_write_buffer_size()

    def end(self, error: Exception) -> None:
        """Ends the subscription with this error: no more messages will arrive."""
        if not self.subscribed.done():
            self.subscribed.set_exception(error)
        elif not self.ended.done():
            self.ended.set_result(error)

    def data_received(self, data: bytes) -> None:
        """Processes the bytes that have arrived."""
        self._reader.feed(data)
        self._unread_bytes += len(data)
        if not self._is_paused:
            self._read()

    def connection_lost(self, error: Exception | None) -> None:
        """Ends the subscription, since the connection is lost."""
        self.end(error or ConnectionError("the server closed the connection"))

    def _read(self) -> None:
        """Processes complete messages, until `hear` asks for a pause."""
        try:
            while (said := self._reader.gets()) is not _NO_MORE:
                self._unread_bytes = 0
                seconds = self._take(said)
                if seconds:
                    self._is_paused = True
                    self._transport.pause_reading()
                    self._loop.call_later(seconds, self._resume)
                    return
            # the reader's own buffer lacks the elements of a long array that it has parsed already
            if self._unread_bytes > MAX_UNREAD_BYTES:
                raise ConnectionError("the server sent a message that is too long")
        except Exception as error:  # noqa: BLE001 - as in ValkeyConnection.run
            self.end(error)

    def _take(self, said: object) -> float:
        """Processes one answer or message; returns how many seconds to pause before the next.

        Raises:
            ConnectionError: it is neither an answer to this router nor a message.
        """
        if isinstance(said, Exception):
            raise said
        match said:
            case [b"message", bytes(), bytes(text)]:
                return self._hear(text)
            case list() if self.subscribed.done():
                raise ConnectionError("the server sent something that is no message")
            case list():
                self.subscribed.set_result(None)
            case _:
                self._answered()
        return 0.0

    def _resume(self) -> None:
        self._is_paused = False
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._read()


def _transport(connection: "AbstractConnection") -> asyncio.Transport:
    """Returns the transport of a client library's connection that has read all answers so far."""
    writer = connection._writer  # noqa: SLF001 - there is no other way to it
    if writer is None:
        raise ConnectionError("the server closed the connection")
    return cast("asyncio.Transport", writer.transport)


def _connection(access: ValkeyAccess, connect_seconds: float) -> "AbstractConnection":
    """Returns a connection of the client library that is not open yet."""
    from valkey.asyncio import connection

    rendezvous = access.rendezvous
    options: dict[str, Any] = {
        "username": access.username or None,
        "password": access.password or None,
        "protocol": 3,
        "socket_timeout": None,
        "socket_connect_timeout": connect_seconds,
        "lib_name": None,
        "lib_version": None,
        "parser_class": _greeting_parser(connection.DefaultParser),
    }
    if rendezvous.engine is None:
        return connection.UnixDomainSocketConnection(path=rendezvous.socket, **options)
    host, port = rendezvous.engine
    if not rendezvous.is_tls:
        return connection.Connection(host=host, port=port, **options)
    return connection.SSLConnection(
        host=host, port=port, ssl_ca_certs=access.ca or None, ssl_check_hostname=True, **options
    )


def _greeting_parser(parser: Any) -> type:
    """Returns the client library's parser with a limit: it only reads answers to the greeting."""

    class GreetingParser(parser):  # type: ignore[misc]
        """Refuses answers that do not end."""

        def on_connect(self, connection: object) -> None:
            """Begins a connection."""
            super().on_connect(connection)
            self._reads = 0

        async def read_from_socket(self) -> bool:
            """Reads a piece."""
            self._reads += 1
            if self._reads > MAX_GREETING_READS:
                raise ConnectionError("the server sent a greeting that is too long")
            return bool(await super().read_from_socket())

    return GreetingParser


SUFFIX = ".router"

# Interval of looking for new routers, and of retrying what failed, in seconds.
LOOK_SECONDS = 0.5

# Most routers that messages are sent to.
MAX_PEERS = 64

# Datagrams that are read before other tasks run.
AT_ONCE = 16


class Datagrams:
    """One router's socket in a directory; its messages go to all others there.

    hear: receives each message, and returns how many seconds to pause before the next. opened:
    called when messages begin to arrive. fault: why nothing can be sent now, "" if messages can be
    sent. lost: messages that another router did not accept.
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

    def send(self, messages: Sequence[bytes]) -> bool:
        """Sends messages to every other router that accepts them now.

        Returns False if this router's socket is not open.
        """
        own, now = self._socket, time.monotonic()
        if own is None:
            return False
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at, self._peers = now, self._peer_paths()
        for peer in list(self._peers):
            for message in messages:
                try:
                    own.sendto(message, peer)
                except (ConnectionRefusedError, FileNotFoundError):
                    self._peers.remove(peer)
                    _remove(peer)  # its router ended without a chance to do so
                    break
                except OSError:  # it does not keep up, and asks for what it misses
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
        except OSError:  # the directory may no longer be searched
            return False

    def _peer_paths(self) -> list[str]:
        """Returns the paths of other routers' sockets, at most `MAX_PEERS`."""
        try:
            found = sorted(self._directory.glob(f"*{SUFFIX}"))
        except OSError:
            return []
        return [str(path) for path in found if path != self._path][:MAX_PEERS]

    def _read(self, own: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                message, sender = own.recvfrom(MAX_BYTES + 1)
            except OSError:
                return
            if sender not in self._peers:
                self._meet(sender)
            seconds = self._hear(message)
            if seconds:
                loop = asyncio.get_running_loop()
                loop.remove_reader(own)
                loop.call_later(seconds, self._resume, own)
                return

    def _meet(self, sender: str | None) -> None:
        """Answers a router that was not seen yet without looking for it first."""
        if sender and len(self._peers) < MAX_PEERS and sender in self._peer_paths():
            self._peers.append(sender)

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
    """Removes a socket; does nothing if that fails, such as after its directory was removed."""
    with contextlib.suppress(OSError):
        Path(path).unlink()


class Transport(Protocol):
    """Carries messages between routers.

    fault: why nothing can be sent now, "" if messages can be sent.
    """

    fault: str

    async def run(self) -> None:
        """Keeps connected until it is cancelled."""

    def send(self, messages: Sequence[bytes]) -> bool:
        """Sends messages; returns whether they were sent."""


def password_of(options: SharingSettings) -> str:
    """Returns the engine's password, "" if there is none.

    Raises:
        StartError: its file cannot be read.
    """
    if options.password_file is None:
        return ""
    return secret_in("sharing.password_file", options.password_file, 1).decode(errors="replace")


def transport_of(
    options: SharingSettings,
    hear: Callable[[bytes], float],
    opened: Callable[[], None],
    answer_seconds: float,
) -> Transport:
    """Returns the configured transport; the other parameters are those of `ValkeyConnection`.

    Raises:
        StartError: the client library is missing, or the file with the password cannot be read.
    """
    rendezvous = address.parse_rendezvous(options.url)
    if rendezvous.directory:
        return Datagrams(rendezvous.directory, hear, opened)
    password = password_of(options)
    access = ValkeyAccess(
        rendezvous, options.channel, options.username or "", password, options.ca or ""
    )
    return ValkeyConnection(access, hear, opened, answer_seconds)
