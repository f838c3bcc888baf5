"""The sockets of one rank's event publisher: PUB for events, ROUTER for asking again."""

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from simulator import frames
from simulator.dialects import Dialect
from simulator.events import Event
from simulator.interference import Interference, ReplayFault
from simulator.layouts import WireEvent
from simulator.replay import Kept, ReplaySocket
from simulator.sockets import bind, connect

HIGH_WATER_MARK_BATCHES = 100_000
"""vLLM's default: a subscriber that falls this far behind loses batches."""
_GARBAGE_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """How one rank publishes."""

    endpoint: str
    replay_endpoint: str | None
    dialect: Dialect
    topic: str
    buffer_batches: int
    rank: int
    replay_limit_messages: int
    """What the replay socket queues for a reader that is slow; it drops what is beyond."""
    connects: bool = False
    """PUB connects to its endpoint, for a subscriber that binds; the replay socket always binds."""


class Publisher:
    """Publishes batches and keeps the latest `buffer_batches` of them for the replay socket.

    Opens its sockets when constructed, in a running event loop (OSError if an endpoint is taken).
    Must be closed.
    """

    def __init__(self, options: PublisherOptions, interference: Interference) -> None:
        self._options = options
        self._interference = interference
        self._topic = options.topic.encode()
        self.endpoint = options.endpoint
        self.replay_endpoint = options.replay_endpoint
        self._open()

    def publish(self, events: Sequence[Event]) -> None:
        """Send one step's events, if there are any to tell of."""
        written: Sequence[WireEvent] = self._options.dialect.layout.written(events)
        if written:
            written = self._interference.spoiled(written)
            payload = frames.batch(time.time(), written, self._options.rank)
            self._deliver(self._interference.garbled(payload))

    def publish_garbage(self, messages: int) -> None:
        """Send random bytes, numbered and kept as batches are."""
        for _ in range(messages):
            self._deliver(os.urandom(_GARBAGE_BYTES))

    def restart(self) -> None:
        """Begin again on the same endpoints, as after the death of the process."""
        self.close()
        self._interference.forget()
        self._open()

    def show_replay_fault(self, fault: ReplayFault | None) -> None:
        """Let the replay socket be as broken as told; None: healthy."""
        self._interference.replay = fault
        if fault == "absent":
            self._close_replay()
        elif self._replay is None:
            self._open_replay()

    def show_events(self, *, hidden: bool) -> None:
        """Close the socket of events, or open it again on the same port.

        Meanwhile batches are numbered and kept for the replay socket, which stays as it is.
        """
        self._interference.is_silent = hidden
        if hidden:
            self._close_events()
        elif self._pub is None:
            self._open_events()

    def close(self) -> None:
        """Close all sockets at once; what is not sent yet is lost, as when an engine stops."""
        self._close_replay()
        self._close_events()

    def _open(self) -> None:
        self.next_sequence = 0
        self._kept: Kept = deque(maxlen=self._options.buffer_batches)
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
            self._kept,
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
        if fate.kept:
            self._kept.append((sequence, payload))
        message = frames.published(self._topic, sequence, payload)
        for ready in self._interference.ordered([message] * fate.sent):
            if self._pub is not None:
                self._pub.send_multipart(ready)
