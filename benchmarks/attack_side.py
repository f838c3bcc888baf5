"""The other sides of an attack, each in a process of its own: worker, empty server, attacker.

    python benchmarks/attack_side.py worker HOST:PORT
    python benchmarks/attack_side.py empty HOST:PORT
    python benchmarks/attack_side.py attack HOST:PORT NAME ...

They share no interpreter with who measures, so that none of them delays the others' requests there.
Each prints a line once it has begun.
"""

import asyncio
import contextlib
import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

import grpc

MIB = 1024 * 1024
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
PATH, UNSALTED_PATH = "/v1/chat/completions", "/unsalted"
GOOD, ATTACKER = "good", "mallory"
ADDRESS = "127.0.0.2"  # of the attacker: where there are no tenants, addresses tell who is who

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_PIECE_BYTES = 256 * 1024
_MAX_ATTACKS = 16  # at once


class Attack(NamedTuple):
    """Bodies that one tenant sends. every: seconds between two of them."""

    size: int
    before: bytes
    unit: bytes
    behind: bytes
    every: float

    def body(self) -> bytes:
        """Returns the body, of `size` bytes or a few less."""
        room = self.size - len(self.before) - len(self.behind)
        return self.before + self.unit * (room // len(self.unit)) + self.behind


TEXT = (b'"model":"tiny","messages":[{"role":"user","content":"', b"a long text ", b'"}]}')
_PARTS = (b'{"model":"tiny","x":"uuid","messages":[', b"0,", b"0]}")
ATTACKS = {
    "28 MiB with uuid": Attack(28 * MIB, *_PARTS, every=4.0),
    "4 MiB with uuid": Attack(4 * MIB, *_PARTS, every=0.5),
    "1 MiB with uuid": Attack(MIB, *_PARTS, every=0.5),
    "28 MiB of text": Attack(28 * MIB, b"{" + TEXT[0], *TEXT[1:], every=0.5),
    "28 MiB of text and a salt": Attack(
        28 * MIB, b'{"cache_salt":"x",' + TEXT[0], *TEXT[1:], every=0.5
    ),
}


def headers_of(tenant: str) -> dict[str, str]:
    """Returns the headers of a tenant's requests, as a filter before the router sets them."""
    return {"x-tenant": tenant, "content-type": "application/json"}


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[None]:
    """Runs a part from when it has begun, until the block ends."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is not None:
                process.stdout.readline()
            yield
        finally:
            process.kill()


class Worker:
    """A worker that reads the bodies of the other tenant with Python's json, as FastAPI does.

    Those of the attacker it only takes in.
    """

    def __init__(self) -> None:
        self._unsalted = 0

    async def run(self, host: str, port: int) -> None:
        """Serves until it is killed."""
        server = await asyncio.start_server(self._serve, host, port, limit=2 * _PIECE_BYTES)
        print("serving", flush=True)
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                content = await self._answer(head, reader)
                writer.write(_ANSWER % (len(content), content))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        first, *others = head.lower().split(b"\r\n")
        if UNSALTED_PATH.encode() in first:
            return b"%d" % self._unsalted
        lines = dict(line.partition(b": ")[::2] for line in others)
        left = int(lines.get(b"content-length", b"0"))
        if lines.get(b"x-tenant") == GOOD.encode():
            self._unsalted += "cache_salt" not in json.loads(await reader.readexactly(left))
            return b"{}"
        while left:
            piece = await reader.read(min(left, _PIECE_BYTES))
            if not piece:
                raise ConnectionError
            left -= len(piece)
        return b"{}"


async def _empty_answers(messages: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
    """Answers each message of Envoy, looks into none of them, and changes nothing.

    A message begins with its one of `ProcessingRequest`, `request_headers` (2) to
    `response_trailers` (7); the answer to it has the number before that in `ProcessingResponse`
    (envoy.service.ext_proc.v3).
    """
    async for message in messages:
        yield bytes((message[0] - 8, 0))


async def serve_empty(address: str) -> None:
    """Serves ext_proc without a router, until it is killed."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    process = grpc.stream_stream_rpc_method_handler(_empty_answers)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),)
    )
    server.add_insecure_port(address)
    await server.start()
    print("serving", flush=True)
    await server.wait_for_termination()


def attack(envoy: str, attacks: Sequence[Attack]) -> None:
    """Sends bodies through Envoy, one kind after the other, until it is killed."""
    bodies = [(one.body(), one.every) for one in attacks]
    room = threading.Semaphore(_MAX_ATTACKS)
    for body, every in itertools.cycle(bodies):
        began = time.monotonic()
        room.acquire()  # a thread gives it back
        threading.Thread(target=_send, args=(envoy, body, room), daemon=True).start()
        print("attacking", flush=True)
        time.sleep(max(0.0, every - (time.monotonic() - began)))


def _send(envoy: str, body: bytes, room: threading.Semaphore) -> None:
    connection = http.client.HTTPConnection(envoy, timeout=30, source_address=(ADDRESS, 0))
    # what becomes of it is nobody's concern: what the others notice counts
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", PATH, body, headers_of(ATTACKER))
        connection.getresponse().read()
    connection.close()
    room.release()


if __name__ == "__main__":
    part, at, *names = sys.argv[1:]
    if part == "worker":
        listen_host, _, listen_port = at.rpartition(":")
        asyncio.run(Worker().run(listen_host, int(listen_port)))
    elif part == "empty":
        asyncio.run(serve_empty(at))
    else:
        attack(at, [ATTACKS[name] for name in names])
