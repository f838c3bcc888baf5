"""A client of HTTP/2 without TLS: many requests on one connection, with trailers if wanted."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events

from tests.system.load import OK, Outcome
from tests.system.system import CHAT

READ_BYTES = 65_536


@dataclass
class _Answer:
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    fault: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Http2Client:
    """One connection; its owner has to run `read`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration())
        self._connection.initiate_connection()
        self._answers: dict[int, _Answer] = {}
        self._window = asyncio.Condition()
        self._flush()

    async def post(
        self, authority: str, prompt: dict[str, Any], trailers: Sequence[tuple[str, str]] = ()
    ) -> Outcome:
        """Sends one chat request."""
        started = time.monotonic()
        body = json.dumps(prompt).encode()
        stream = self._connection.get_next_available_stream_id()
        answer = self._answers[stream] = _Answer()
        self._connection.send_headers(
            stream,
            [
                (":method", "POST"),
                (":path", CHAT),
                (":scheme", "http"),
                (":authority", authority),
                ("content-type", "application/json"),
            ],
        )
        await self._send_body(stream, body, ends=not trailers)
        if trailers:
            self._connection.send_headers(stream, trailers, end_stream=True)
        self._flush()
        await answer.ended.wait()
        status = int(answer.headers.get(":status", 0))
        fault = answer.fault or ("" if status == OK else answer.body.decode(errors="replace"))
        worker = answer.headers.get("x-worker", "")
        return Outcome(status, worker, fault, started, time.monotonic())

    async def read(self) -> None:
        """Receives until the connection ends."""
        while data := await self._reader.read(READ_BYTES):
            for event in self._connection.receive_data(data):
                self._take(event)
            self._flush()
            async with self._window:
                self._window.notify_all()
        for answer in self._answers.values():
            self._end(answer, "connection closed")

    async def _send_body(self, stream: int, body: bytes, *, ends: bool) -> None:
        rest = memoryview(body)
        while rest:
            window = self._connection.local_flow_control_window(stream)
            size = min(window, self._connection.max_outbound_frame_size, len(rest))
            if size <= 0:
                self._flush()
                async with self._window:
                    await self._window.wait()
                continue
            last = ends and size == len(rest)
            self._connection.send_data(stream, bytes(rest[:size]), end_stream=last)
            rest = rest[size:]

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                answer = self._answers[event.stream_id or 0]
                answer.headers = {_text(name): _text(value) for name, value in event.headers or []}
            case h2.events.DataReceived():
                self._answers[event.stream_id or 0].body += event.data or b""
                self._connection.acknowledge_received_data(
                    event.flow_controlled_length or 0, event.stream_id or 0
                )
            case h2.events.StreamEnded():
                self._end(self._answers[event.stream_id or 0], "")
            case h2.events.StreamReset():
                self._end(self._answers[event.stream_id or 0], f"reset: {event.error_code}")
            case h2.events.ConnectionTerminated():
                for answer in self._answers.values():
                    self._end(answer, f"GOAWAY: {event.error_code}")

    def _end(self, answer: _Answer, fault: str) -> None:
        if not answer.ended.is_set():
            answer.fault = fault
            answer.ended.set()

    def _flush(self) -> None:
        self._writer.write(self._connection.data_to_send())


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Http2Client]:
    """A connection, read until the block ends."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    client = Http2Client(reader, writer)
    reading = asyncio.create_task(client.read())
    try:
        yield client
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
