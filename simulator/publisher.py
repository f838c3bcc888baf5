"""The sockets that vLLM's `zmq` event publisher opens: PUB for events, ROUTER for asking again."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import zmq
import zmq.asyncio

from simulator import frames
from simulator.events import Event

HIGH_WATER_MARK_BATCHES = 100_000
"""vLLM's default: a subscriber that falls this far behind loses batches."""
_MAX_REQUEST_BYTES = 1024  # a replay request has 8


class Publisher:
    """Publishes batches and keeps the latest `buffer_batches` of them for `answer_replays`.

    Binds when constructed (OSError if an endpoint is taken). Must be closed.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, *, topic: str, buffer_batches: int
    ) -> None:
        self._topic = topic.encode()
        self._next_sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._context = zmq.Context()
        # Sending on PUB never waits, so this socket needs no event loop.
        self._pub = self._context.socket(zmq.PUB)
        self._router = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
        self._sockets = (self._pub, self._router)
        try:
            self._pub.sndhwm = HIGH_WATER_MARK_BATCHES
            self.endpoint = _bind(self._pub, endpoint)
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                # A ROUTER drops what exceeds this, and one whole answer must fit.
                self._router.sndhwm = buffer_batches + 1
                self._router.maxmsgsize = _MAX_REQUEST_BYTES
                self.replay_endpoint = _bind(self._router, replay_endpoint)
        except BaseException:
            self.close()
            raise

    def publish(self, events: Sequence[Event]) -> None:
        """Send one step's events, if there are any."""
        if not events:
            return
        payload = frames.batch(time.time(), events)
        self._buffer.append((self._next_sequence, payload))
        self._pub.send_multipart(frames.published(self._topic, self._next_sequence, payload))
        self._next_sequence += 1

    async def answer_replays(self) -> None:
        """Serve the replay socket until cancelled; returns at once without one."""
        if self.replay_endpoint is None:
            return
        while True:
            client, *request = await self._router.recv_multipart()
            start = frames.replay_start(request)
            if start is None:
                continue
            for sequence, payload in list(self._buffer):
                if sequence >= start:
                    batch = frames.replayed(self._topic, sequence, payload)
                    await self._router.send_multipart((client, *batch))
            await self._router.send_multipart((client, *frames.END_OF_REPLAY))
            await asyncio.sleep(0)

    def close(self) -> None:
        """Close all sockets at once; what is not sent yet is lost, as when an engine stops."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str) -> str:
    socket.ipv6 = "[" in endpoint
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(
            error.errno, f"cannot bind {endpoint}: {zmq.strerror(error.errno or 0)}"
        ) from error
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
