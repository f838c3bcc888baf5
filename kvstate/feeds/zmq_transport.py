"""ZMQ feeds: a SUB socket that mends itself, and replays over a DEALER.

vLLM and SGLang publish on a PUB socket and answer replays on a ROUTER socket; the request is
[empty, first number (8 bytes big-endian)], the answers are parsed by `kvstate.wire.zmq_wire`.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import zmq
import zmq.asyncio

from kvstate.errors import ReplayError, WireError
from kvstate.feeds.backoff import Backoff
from kvstate.feeds.feed import Recovery
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.transport import Batch, Disconnected, Malformed, Signal
from kvstate.feeds.zmq_monitor import Monitor
from kvstate.wire.zmq_wire import parse_frames

# A rank takes three, and one more while it replays; libzmq's own default is 1,023.
MAX_SOCKETS = 65_535

# A publisher that died without a word is noticed by its silence.
HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 6_000
RECONNECT_MIN_MS = 50
RECONNECT_MAX_MS = 2_000
OPEN_RETRY_SECONDS = (0.5, 10.0)

# Messages kept by the socket while the loop is busy. Beyond it they wait in the publisher, which
# drops beyond a limit of its own (hwm).
RECEIVE_QUEUE_MESSAGES = 1_000
# Signals handed on at once: several waiting messages cost one poll.
MAX_SIGNALS = 64
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

# How long a publisher may take for each message of a replay.
REPLAY_TIMEOUT_SECONDS = 5.0


class ZmqContext(zmq.asyncio.Context):
    """One a process: it owns the threads that do the input and output."""

    def __init__(self, io_threads: int = 1) -> None:
        super().__init__(io_threads)
        self.set(zmq.MAX_SOCKETS, MAX_SOCKETS)


class ZmqTransport:
    """A subscription to one rank.

    chance: 0 to 1, for the jitter of tries to open it.
    """

    def __init__(
        self, context: ZmqContext, source: ZmqSource, chance: Callable[[], float] = lambda: 0.5
    ) -> None:
        self._context = context
        self._source = source
        self._retries = Backoff(*OPEN_RETRY_SECONDS, chance)
        self._retry_seconds = 0.0
        self._opened: tuple[zmq.asyncio.Socket, Monitor] | None = None
        self._fault = self._open()

    @property
    def recovery(self) -> Recovery:
        """A replay, if the source names an endpoint for it."""
        return Recovery.NONE if self._source.replay is None else Recovery.REPLAY

    async def receive(self) -> list[Signal]:
        """All signals that wait, at least one, up to `MAX_SIGNALS`.

        A message is taken before the monitor is looked at: libzmq tells of a connection before it
        delivers from it. Nothing after the poll waits, or a cancellation would lose signals.
        """
        if self._opened is None:
            return [await self._open_later()]
        signals: list[Signal] = []
        while not signals:
            socket, monitor = self._opened
            await monitor.wait()
            signals = await _taken(socket, monitor)
        return signals

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        """Asks for the batches from `start` on; each replay has a socket of its own."""
        if self._source.replay is None:
            raise ReplayError("no replay endpoint")
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise ReplayError(str(error)) from None
        try:
            _configure(socket)
            socket.connect(self._source.replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            last = -1
            while True:
                frames = parse_frames(await _answer(socket))
                if frames.ends_replay:
                    return
                if frames.sequence <= last:
                    raise ReplayError("its numbers do not ascend")
                last = frames.sequence
                yield Batch(frames.sequence, frames.payload)
        except (WireError, zmq.ZMQError) as error:
            raise ReplayError(str(error)) from None
        finally:
            socket.close()

    async def close(self) -> None:
        """Closes the subscription."""
        if self._opened is not None:
            socket, monitor = self._opened
            monitor.close()
            socket.close()

    def _open(self) -> str:
        """Opens the subscription; says why that cannot be, "" if it is done."""
        verb = "bind" if self._source.binds else "connect to"
        with contextlib.ExitStack() as undone:
            try:
                socket = self._context.socket(zmq.SUB)
                undone.callback(socket.close)
                monitor = Monitor(socket)
                undone.callback(monitor.close)
                _configure(socket)
                socket.set(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
                socket.set(zmq.SUBSCRIBE, self._source.topic.encode())
                (socket.bind if self._source.binds else socket.connect)(self._source.events)
            except zmq.ZMQError as error:
                return f"cannot {verb} {self._source.events}: {zmq.strerror(error.errno or 0)}"
            undone.pop_all()
        self._opened = socket, monitor
        return ""

    async def _open_later(self) -> Signal:
        """Tells why it is not open, then tries again."""
        await asyncio.sleep(self._retry_seconds)
        if self._retry_seconds:
            self._fault = self._open()
        self._retry_seconds = self._retries.next_seconds()
        return Disconnected(self._fault or "not connected yet")


async def _taken(socket: zmq.asyncio.Socket, monitor: Monitor) -> list[Signal]:
    """What waits on the socket and its monitor, in the order in which it happened."""
    signals: list[Signal] = []
    while len(signals) < MAX_SIGNALS:
        message = await _waiting(socket)
        changes = await monitor.changes()
        signals += changes
        if any(isinstance(change, Disconnected) for change in changes):
            await _drop_queued(socket)
        elif message is not None:
            signals.append(_signal(message))
        if message is None or changes:
            break
    return signals


def _signal(message: list[bytes]) -> Signal:
    try:
        frames = parse_frames(message)
    except WireError:
        return Malformed()
    return Batch(frames.sequence, frames.payload)


async def _drop_queued(socket: zmq.asyncio.Socket) -> None:
    """Drops what the lost connection left behind: it must not pass for the next one's."""
    while await _waiting(socket) is not None:
        pass


async def _answer(socket: zmq.asyncio.Socket) -> list[bytes]:
    try:
        async with asyncio.timeout(REPLAY_TIMEOUT_SECONDS):
            frames: list[bytes] = await socket.recv_multipart()
    except TimeoutError:
        raise ReplayError(f"no answer within {REPLAY_TIMEOUT_SECONDS:g} s") from None
    return frames


async def _waiting(socket: zmq.asyncio.Socket) -> list[bytes] | None:
    """A message that waits already, None if there is none."""
    try:
        frames: list[bytes] = await socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return frames


def _configure(socket: zmq.asyncio.Socket) -> None:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MIN_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
