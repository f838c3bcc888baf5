"""A connection to one ZMQ peer, with bounded memory and heartbeats.

It does not use libzmq: with a full receive queue, libzmq aborts the process when the publisher dies
or stalls while either side has heartbeats (zeromq/libzmq#3937 and `!_io_error`, both in 4.3.5), and
without a limit to that queue, its memory grows while the loop is busy.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import NamedTuple

from kvstate.errors import WireError
from kvstate.feeds.zmq_limits import USUAL, ZmqLimits
from kvstate.wire.zmtp import ZmtpSession, message

# Twice the largest message that is decoded (kvstate.wire.zmq_wire), so that a batch that is too
# large is reported by its number; beyond this the connection is closed.
MAX_MESSAGE_BYTES = 8 * 1024 * 1024
# Answers to heartbeats that the peer does not read.
MAX_ANSWER_BYTES = 64 * 1024

# Heartbeats come now and then; a peer that sends many more commands in this time is flooding.
COMMANDS_SECONDS = 2.0

# A peer that sends nothing for this many intervals, and answers no heartbeats, is dead or hangs.
# Intervals are counted, not timed: a delay of this process's own loop is not the peer's fault.
MAX_SILENT_HEARTBEATS = 2

# A peer of ZMTP 3.0 answers no heartbeats; its system answers TCP keep-alives after ten silent
# seconds.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class ZmtpAddress(NamedTuple):
    """The address of a ZMQ endpoint: host and port, or the path of a Unix socket."""

    host: str
    port: int
    path: str = ""


def place_of(endpoint: str) -> ZmtpAddress | None:
    """Parses tcp://host:port and ipc://path; returns None for anything else."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        return ZmtpAddress("", 0, "\0" + rest[1:] if rest[0] == "@" else rest)
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()):
        return None
    return ZmtpAddress(host.strip("[]"), int(port)) if int(port) < 1 << 16 else None


class ZmtpConnection(asyncio.Protocol):
    """One connection, opened by either side.

    changed: is called when it is ready, when messages can be taken, and when it is lost. session:
    what both sides said so far.
    """

    def __init__(
        self,
        kind: bytes,
        changed: Callable[["ZmtpConnection"], None],
        topic: bytes = b"",
        limits: ZmqLimits = USUAL,
    ) -> None:
        self.is_lost = False
        self.fault = ""  # why it was closed, if it was
        self.settled = asyncio.Event()  # the handshake has succeeded or failed
        self.lost = asyncio.Event()
        self.session = ZmtpSession(
            kind, MAX_MESSAGE_BYTES, topic, max_commands=limits.commands_at_once
        )
        self._changed = changed
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silent_heartbeats = 0
        self._is_paused = False
        self._commands, self._commands_at = 0, 0.0  # at the start of the present count

    @property
    def is_ready(self) -> bool:
        """Whether messages may be sent and taken."""
        return self.session.is_ready and not self.is_lost

    @property
    def was_ready(self) -> bool:
        """Whether the handshake succeeded, even if the connection is lost now."""
        return self.session.is_ready

    async def open(self, place: ZmtpAddress) -> None:
        """Connects and waits for the handshake to succeed or fail.

        Raises:
            OSError: the connection cannot be made.
        """
        loop = asyncio.get_running_loop()
        try:
            if place.path:
                await loop.create_unix_connection(lambda: self, place.path)
            else:
                await loop.create_connection(lambda: self, place.host, place.port)
        except BaseException:
            self._stop_timer()  # if cancelled just then, uvloop closes it without `connection_lost`
            raise
        await self.settled.wait()

    def take(self, limit: int) -> list[list[bytes]]:
        """Returns at most `limit` of the waiting messages, in order."""
        taken: list[list[bytes]] = []
        before = self.session.commands
        try:
            while len(taken) < limit and (frames := self.session.take()) is not None:
                taken.append(frames)
        except WireError as error:
            self.give_up(str(error))
        self._answer()
        if self.session.commands > before:
            self._count_commands()
        self._go_on(has_more=len(taken) == limit)
        return taken

    def send(self, frames: list[bytes]) -> None:
        """Sends one message; does nothing once the connection ends."""
        if self._transport and not self._transport.is_closing():
            self._transport.write(message(frames))

    def give_up(self, fault: str) -> None:
        """Closes the connection; `connection_lost` follows soon."""
        self.fault = self.fault or fault
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Part of asyncio.Protocol."""
        self._transport = transport
        if self.fault:  # closed before it began
            transport.abort()
            return
        _keep_alive(transport.get_extra_info("socket"))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limits.handshake_seconds, self.give_up, "no handshake")
        self._answer()

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol; messages are parsed when they are taken."""
        session = self.session
        session.receive(data)
        self._silent_heartbeats = 0
        if not session.is_ready and not self._shake():
            return
        if session.size_bytes >= self._limits.queue_bytes and self._transport:
            self._is_paused = True
            self._transport.pause_reading()
        self._changed(self)

    def connection_lost(self, _: Exception | None) -> None:
        """Part of asyncio.Protocol."""
        self.is_lost = True
        self._stop_timer()
        self.settled.set()
        self.lost.set()
        self._changed(self)

    def _count_commands(self) -> None:
        """Closes the connection if the peer sends too many commands; calls `changed` again soon."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._commands_at + COMMANDS_SECONDS:
            self._commands, self._commands_at = self.session.commands, loop.time()
        elif self.session.commands - self._commands > self._limits.max_commands:
            self.give_up(
                f"more than {self._limits.max_commands} commands in {COMMANDS_SECONDS:g} s"
            )
        loop.call_soon(self._changed, self)

    def _go_on(self, *, has_more: bool) -> None:
        """Resumes reading once there is room, or if a message is incomplete."""
        if not self._is_paused or self._transport is None or self._transport.is_closing():
            return
        if not has_more or self.session.size_bytes < self._limits.queue_bytes // 2:
            self._is_paused = False
            self._transport.resume_reading()

    def _shake(self) -> bool:
        try:
            is_done = self.session.shake()
        except WireError as error:
            self.give_up(str(error))
            return False
        self._answer()
        if is_done:
            self.settled.set()
            self._stop_timer()
            if self.session.has_heartbeats:
                self._beat_later()
        return is_done

    def _beat_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(
            self._limits.heartbeat_seconds, self._beat
        )

    def _beat(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if not self._is_paused:  # otherwise it waits for us
            self._silent_heartbeats += 1
        if self._silent_heartbeats > MAX_SILENT_HEARTBEATS:
            self.give_up("no answer to heartbeats")
            return
        self.session.ping()
        self._answer()
        self._beat_later()

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _answer(self) -> None:
        answers = self.session.answers()
        if not answers or self._transport is None or self._transport.is_closing():
            return  # uvloop refuses to write to what is closed
        self._transport.write(answers)
        if self._transport.get_write_buffer_size() > MAX_ANSWER_BYTES:
            self.give_up("it does not read the data that it requested")


def _keep_alive(connected: socket.socket) -> None:
    """Turns on TCP keep-alive, to detect a machine that vanished."""
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
