"""ZMQ feeds: a SUB socket that mends itself, and replays over a DEALER.

vLLM and SGLang publish on a PUB socket and answer replays on a ROUTER socket; the request is
[empty, first number (8 bytes big-endian)], the answers are parsed by `kvstate.zmq_wire`.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvstate.errors import ReplayError, WireError
from kvstate.transport import Connected, Disconnected, Message, Signal
from kvstate.zmq_wire import parse_frames

# One a process: it owns the threads that do the input and output.
ZmqContext = zmq.asyncio.Context

# A publisher that died without a word is noticed by its silence.
HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 6_000
RECONNECT_MIN_MS = 50
RECONNECT_MAX_MS = 2_000

# Messages kept by the socket while the loop is busy; beyond it the publisher's own limit drops.
RECEIVE_QUEUE_MESSAGES = 20_000
# Signals handed on at once: several waiting messages cost one poll.
MAX_SIGNALS = 64
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# How long a publisher may take for each message of a replay.
REPLAY_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ZmqSource:
    """Where one rank publishes; replay is None where it cannot replay."""

    events: str
    replay: str | None
    topic: str


class ZmqTransport:
    """A subscription to one rank."""

    def __init__(self, context: ZmqContext, source: ZmqSource) -> None:
        self._context = context
        self._source = source
        self._socket = context.socket(zmq.SUB)
        _configure(self._socket)
        self._socket.set(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
        self._socket.set(zmq.SUBSCRIBE, source.topic.encode())
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        self._socket.connect(source.events)

    @property
    def can_replay(self) -> bool:
        """Whether the source names a replay endpoint."""
        return self._source.replay is not None

    async def receive(self) -> list[Signal]:
        """All signals that wait, at least one, up to `MAX_SIGNALS`.

        A message is taken before the monitor is looked at: libzmq tells of a connection before it
        delivers from it. Nothing after the poll waits, or a cancellation would lose signals.
        """
        signals: list[Signal] = []
        while not signals:
            await self._poller.poll()
            while len(signals) < MAX_SIGNALS:
                message = await _waiting(self._socket)
                changes = await self._changes()
                signals += changes
                if Disconnected() in changes:
                    await self._drop_queued()
                elif message is not None:
                    signals.append(Message(message))
                if message is None or changes:
                    break
        return signals

    async def _changes(self) -> list[Signal]:
        """What happened to the connection since the last look."""
        changes: list[Signal] = []
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            frames = await _waiting(self._monitor)
            if frames is not None:
                event = parse_monitor_message(frames)["event"]
                connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                changes.append(Connected() if connected else Disconnected())
        return changes

    async def _drop_queued(self) -> None:
        """Drops what the lost connection left behind: it must not pass for the next one's."""
        while await _waiting(self._socket) is not None:
            pass

    async def replay(self, start: int) -> AsyncGenerator[Message]:
        """Asks for the batches from `start` on; each replay has a socket of its own."""
        if self._source.replay is None:
            raise ReplayError("no replay endpoint")
        socket = self._context.socket(zmq.DEALER)
        _configure(socket)
        try:
            socket.connect(self._source.replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            last = -1
            while True:
                message = await self._answer(socket)
                frames = parse_frames(message.frames)
                if frames.ends_replay:
                    return
                if frames.sequence <= last:
                    raise ReplayError("its numbers do not ascend")
                last = frames.sequence
                yield message
        except (WireError, zmq.ZMQError) as error:
            raise ReplayError(str(error)) from None
        finally:
            socket.close()

    async def close(self) -> None:
        """Closes the subscription."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    async def _answer(self, socket: zmq.asyncio.Socket) -> Message:
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_SECONDS):
                return Message(await socket.recv_multipart())
        except TimeoutError:
            raise ReplayError(f"no answer within {REPLAY_TIMEOUT_SECONDS:g} s") from None


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
