"""HTTP/2 without TLS, as a worker and as a client: with trailers and duplicate headers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events

Headers = list[tuple[str, str]]
READ_BYTES = 65_536


@dataclass
class Message:
    """A complete request or response."""

    headers: Headers = field(default_factory=list)
    body: bytes = b""
    trailers: Headers = field(default_factory=list)

    def get(self, name: str) -> list[str]:
        """All values of a header."""
        return [value for key, value in self.headers if key == name]


class _Peer:
    """One side of a connection; complete messages are in `done`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, client: bool
    ) -> None:
        settings = h2.config.H2Configuration(client_side=client, header_encoding="utf-8")
        self.connection = h2.connection.H2Connection(settings)
        self.connection.initiate_connection()
        self.done: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self._reader, self._writer = reader, writer
        self._open: dict[int, Message] = {}
        self._window = asyncio.Event()
        self._flush()

    async def read(self) -> None:
        """Reads until the other side closes."""
        while data := await self._reader.read(READ_BYTES):
            for event in self.connection.receive_data(data):
                self._take(event)
            self._window.set()
            self._flush()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived | h2.events.ResponseReceived):
            self._open[event.stream_id] = Message(list(event.headers))  # type: ignore[arg-type]
        elif isinstance(event, h2.events.DataReceived):
            self._open[event.stream_id].body += event.data
            size = event.flow_controlled_length
            self.connection.acknowledge_received_data(size, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived):
            self._open[event.stream_id].trailers = list(event.headers)  # type: ignore[arg-type]
        elif isinstance(event, h2.events.StreamEnded):
            self.done.put_nowait((event.stream_id, self._open.pop(event.stream_id)))

    async def send(self, stream: int, message: Message) -> None:
        """Sends a message, trailers last if it has any."""
        connection = self.connection
        connection.send_headers(stream, message.headers)
        body = message.body
        while body:
            room = min(
                connection.local_flow_control_window(stream), connection.max_outbound_frame_size
            )
            if not room:
                self._window.clear()
                self._flush()
                await self._window.wait()
                continue
            connection.send_data(stream, body[:room])
            body = body[room:]
        if message.trailers:
            connection.send_headers(stream, message.trailers, end_stream=True)
        else:
            connection.end_stream(stream)
        self._flush()

    def _flush(self) -> None:
        self._writer.write(self.connection.data_to_send())


@contextlib.asynccontextmanager
async def h2_worker(port: int) -> AsyncIterator[list[Message]]:
    """Serves HTTP/2 with prior knowledge; yields the requests received.

    Each is answered with its worker's port, two cookies, and a trailer.
    """
    requests: list[Message] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _Peer(reader, writer, client=False)
        answering = asyncio.create_task(_answer(peer, port, requests))
        with contextlib.suppress(ConnectionError):
            await peer.read()
        answering.cancel()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield requests
    finally:
        server.close()


async def _answer(peer: _Peer, port: int, requests: list[Message]) -> None:
    while True:
        stream, request = await peer.done.get()
        requests.append(request)
        headers = [
            (":status", "200"),
            ("content-type", "application/json"),
            ("x-worker", f"127.0.0.1:{port}"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
        ]
        body = json.dumps({"bytes": len(request.body)}).encode()
        await peer.send(stream, Message(headers, body, [("x-checksum", "42")]))


async def h2_request(
    port: int, path: str, body: bytes, headers: Sequence[tuple[str, str]], trailers: Headers
) -> Message:
    """Sends one POST by HTTP/2 with prior knowledge; returns the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    peer = _Peer(reader, writer, client=True)
    reading = asyncio.create_task(peer.read())
    start = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", path)]
    await peer.send(1, Message([*start, *headers], body, trailers))
    async with asyncio.timeout(60):
        _, response = await peer.done.get()
    writer.close()
    reading.cancel()
    return response
