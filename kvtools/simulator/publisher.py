"""The publishers of one rank: sockets for events (PUB), replays (ROUTER) and its load (PUB).

Layouts follow recorded frames. A batch is a msgpack array of time, events and rank. Sequence
numbers are 8 bytes, big-endian, from 0. Answers of a replay socket name the topic since vLLM 0.26
and SGLang 0.5.22, and in TensorRT-LLM.
"""

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from kvtools.simulator.dialects import EventDialect, WireEvent
from kvtools.simulator.events import Event
from kvtools.simulator.interference import Interference, ReplayFault

_SEQUENCE_BYTES = 8
_MAX_START_BYTES = 8
_END_SEQUENCE = b"\xff" * _SEQUENCE_BYTES
_MAX_REQUEST_BYTES = 1024  # a replay request has 8

HIGH_WATER_MARK_BATCHES = 100_000
"""vLLM's default: a subscriber that falls this far behind loses batches."""

_GARBAGE_BYTES = 64
Socket = zmq.Socket[bytes] | zmq.asyncio.Socket

Kept = deque[tuple[int, bytes]]
"""Sequence numbers and payloads, oldest first."""

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """How one rank publishes."""

    endpoint: str
    replay_endpoint: str | None
    dialect: EventDialect
    topic: str
    buffer_batches: int
    rank: int
    replay_limit_messages: int
    """The messages that the replay socket queues for a slow reader; it drops further ones."""
    connects: bool = False
    """Whether PUB connects, for a subscriber that binds; the replay socket always binds."""


class Publisher:
    """Publishes batches and keeps the latest `buffer_batches` of them for the replay socket.

    It opens its sockets when constructed, in a running event loop, and must be closed.

    Raises:
        OSError: an endpoint is taken.
    """

    def __init__(self, options: PublisherOptions, interference: Interference) -> None:
        self._options = options
        self._interference = interference
        self._topic = options.topic.encode()
        self.endpoint = options.endpoint
        self.replay_endpoint = options.replay_endpoint
        self._open()

    def publish(self, events: Sequence[Event]) -> None:
        """Sends one step's events, if the dialect publishes any of them."""
        written: Sequence[WireEvent] = self._options.dialect.layout.encode(events)
        if written:
            written = self._interference.spoiled(written)
            now = time.time() + self._interference.clock_ahead_seconds
            payload = batch(now, written, self._options.rank)
            self._deliver(self._interference.garbled(payload))

    def publish_garbage(self, messages: int) -> None:
        """Sends random bytes, numbered and kept as batches are."""
        for _ in range(messages):
            self._deliver(os.urandom(_GARBAGE_BYTES))

    def publish_recorded(self, payload: bytes) -> None:
        """Sends a batch of an engine as it was recorded, numbered and kept as others are."""
        self._deliver(payload)

    def restart(self) -> None:
        """Starts over on the same endpoints, as after the death of the process."""
        self.close()
        self._interference.forget()
        self._open()

    def show_replay_fault(self, fault: ReplayFault | None) -> None:
        """Sets a fault of the replay socket; None makes it healthy again."""
        self._interference.replay = fault
        if fault == "absent":
            self._close_replay()
        elif self._replay is None:
            self._open_replay()

    def show_events(self, *, hidden: bool) -> None:
        """Closes the socket of events, or opens it again on the same port.

        Meanwhile batches are numbered and kept for the replay socket, which stays as it is.
        """
        self._interference.is_silent = hidden
        if hidden:
            self._close_events()
        elif self._pub is None:
            self._open_events()

    def close(self) -> None:
        """Closes all sockets at once; unsent messages are lost, as when an engine stops."""
        self._close_replay()
        self._close_events()

    def _open(self) -> None:
        self.next_sequence = 0
        self._history: Kept = deque(maxlen=self._options.buffer_batches)
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: ReplaySocket | None = None
        try:
            self._open_events()
            self._open_replay()
        except BaseException:
            self.close()
            raise

    def _open_events(self) -> None:
        if self._interference.is_silent:
            return
        # Sending on PUB never waits, so this socket needs no event loop. Its context is its own, so
        # that closing it can wait until the port is really free.
        self._pub = zmq.Context().socket(zmq.PUB)
        self._pub.sndhwm = HIGH_WATER_MARK_BATCHES
        attach = connect if self._options.connects else bind
        self.endpoint = attach(self._pub, self.endpoint)

    def _close_events(self) -> None:
        if self._pub is not None:
            self._pub.close(linger=0)
            self._pub.context.term()
            self._pub = None

    def _open_replay(self) -> None:
        if self.replay_endpoint is None or self._interference.replay == "absent":
            return
        self._replay = ReplaySocket(
            self.replay_endpoint,
            self._history,
            topic=self._topic,
            send_limit_messages=self._options.replay_limit_messages,
            dialect=self._options.dialect,
            interference=self._interference,
        )
        self.replay_endpoint = self._replay.endpoint

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def _deliver(self, payload: bytes) -> None:
        sequence, fate = self.next_sequence, self._interference.fate()
        self.next_sequence += 1
        if fate.is_kept:
            self._history.append((sequence, payload))
        message = published(self._topic, sequence, payload)
        for ready in self._interference.ordered([message] * fate.sent):
            if self._pub is not None:
                self._pub.send_multipart(ready)


LOAD_TOPIC = "load"
LOAD_SECONDS = 0.05
"""How soon a changed load is published."""
LOAD_HEARTBEAT_SECONDS = 1.0
"""How soon an unchanged load is published again."""

LoadStat = tuple[str, int, int, int, int, int]
"""Its name, requests running and waiting, tokens of the cache in use and in all, and the rank."""


class LoadPublisher:
    """Publishes the load of one rank, as SGLang's `--load-publish-endpoint` does.

    Layout and times are those of `sglang.srt.managers.scheduler_components.load_publisher`; SGLang
    publishes only between steps, which take no time here. It opens its socket when constructed, in
    a running event loop, and must be closed.

    load: returns the current load.

    Raises:
        OSError: the endpoint is taken.
    """

    def __init__(self, endpoint: str, load: Callable[[], LoadStat]) -> None:
        self._load = load
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        try:
            self.endpoint = bind(self._pub, endpoint)
        except BaseException:
            self._close_socket()
            raise
        self.restart()
        self._task = asyncio.create_task(self._keep_publishing())

    def restart(self) -> None:
        """Numbers its messages from 0 again."""
        self._numbers = itertools.count()

    def close(self) -> None:
        """Stops at once."""
        self._task.cancel()
        self._close_socket()

    def _close_socket(self) -> None:
        self._pub.close(linger=0)
        self._context.term()

    async def _keep_publishing(self) -> None:
        last, due_at = None, 0.0
        while True:
            load, now = self._load(), time.monotonic()
            if load != last or now >= due_at:
                last, due_at = load, now + LOAD_HEARTBEAT_SECONDS
                payload = _encoder.encode(load)
                self._pub.send_multipart(
                    published(LOAD_TOPIC.encode(), next(self._numbers), payload)
                )
            await asyncio.sleep(LOAD_SECONDS)


class ReplaySocket:
    """Answers replay requests from `kept` until it is closed."""

    def __init__(
        self,
        endpoint: str,
        kept: Kept,
        *,
        topic: bytes,
        send_limit_messages: int,
        dialect: EventDialect,
        interference: Interference,
    ) -> None:
        self._history = kept
        self._topic = topic
        self._with_topic = dialect.replay_topic
        self._interference = interference
        # Its own context, so that closing it can wait until the port is really free.
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._router.sndhwm = send_limit_messages  # a ROUTER drops messages beyond it
            self._router.maxmsgsize = _MAX_REQUEST_BYTES
            self.endpoint = bind(self._router, endpoint)
        except BaseException:
            self._close_socket()
            raise
        self._task = asyncio.create_task(self._serve())

    def close(self) -> None:
        """Stops at once, also in the middle of an answer."""
        self._task.cancel()
        self._close_socket()

    def _close_socket(self) -> None:
        self._router.close(linger=0)
        self._context.term()

    async def _serve(self) -> None:
        while True:
            client, *request = await self._router.recv_multipart()
            start = replay_start(request)
            if start is not None and self._interference.replay != "silent":
                await self._answer(client, start)
            await asyncio.sleep(0)

    async def _answer(self, client: bytes, start: int) -> None:
        wanted = [entry for entry in self._history if entry[0] >= start]
        truncated = self._interference.replay == "truncated"
        for sequence, payload in wanted[: len(wanted) // 2] if truncated else wanted:
            batch = replayed(self._topic, sequence, payload, with_topic=self._with_topic)
            await self._router.send_multipart((client, *batch))
        if not truncated:
            end = end_of_replay(with_topic=self._with_topic)
            await self._router.send_multipart((client, *end))


def batch(timestamp: float, events: Sequence[WireEvent], rank: int = 0) -> bytes:
    """Returns the payload for one step's events.

    timestamp: seconds since the epoch.
    """
    return _encoder.encode((timestamp, events, rank))


def published(topic: bytes, sequence: int, payload: bytes) -> tuple[bytes, ...]:
    """Returns the frames that subscribers receive."""
    return (topic, sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload)


def replayed(
    topic: bytes, sequence: int, payload: bytes, *, with_topic: bool = True
) -> tuple[bytes, ...]:
    """Returns the frames of the same batch in an answer of the replay socket."""
    message = published(topic, sequence, payload)
    return (b"", *(message if with_topic else message[1:]))


def end_of_replay(*, with_topic: bool = True) -> tuple[bytes, ...]:
    """Returns the frames that end every replay; their topic is empty even if a topic is set."""
    end = (b"", b"", _END_SEQUENCE, b"")
    return end if with_topic else end[1:]


def replay_start(request: Sequence[bytes]) -> int | None:
    """Returns the first sequence number requested; None for a request to ignore.

    request: without the sender's routing frame: an empty delimiter and the number. vLLM reads
    shorter numbers too, and answers nothing to a request without the delimiter.
    """
    match request:
        case [b"", start] if 0 < len(start) <= _MAX_START_BYTES:
            return int.from_bytes(start, "big")
        case _:
            return None


def bind(socket: Socket, endpoint: str) -> str:
    """Binds a socket; returns the endpoint with the port that the system chose.

    Raises:
        OSError: the endpoint is taken.
    """
    socket.ipv6 = "[" in endpoint
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise _in_words("bind", endpoint, error) from error
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def connect(socket: Socket, endpoint: str) -> str:
    """Connects a socket, now or once the peer listens; returns the endpoint.

    Raises:
        OSError: the endpoint is not valid.
    """
    socket.ipv6 = "[" in endpoint
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise _in_words("connect to", endpoint, error) from error
    return endpoint


def _in_words(verb: str, endpoint: str, error: zmq.ZMQError) -> OSError:
    reason = zmq.strerror(error.errno or 0)
    return OSError(error.errno, f"cannot {verb} {endpoint}: {reason}")
