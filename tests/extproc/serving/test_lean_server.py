"""What only the lean server does, with peers that grpc's own client cannot be."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import generate_latest

from extproc._core import Session
from extproc.base.errors import ProtocolError
from extproc.http2.codes import ErrorCode
from extproc.http2.limits import Limits
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingMode, ProcessingRequest, ProcessingResponse
from extproc.pb.kvsteer_health_pb2 import HealthCheckResponse
from extproc.running import event_loop
from extproc.serving.exchange import Exchange
from extproc.serving.lean_server import TICK_FAULT, LeanServer
from extproc.serving.server_bounds import USUAL, ServerBounds
from tests.extproc.http2.peer import (
    END_HEADERS,
    END_STREAM,
    OPEN_BYTES,
    Sent,
    data,
    frames_of,
    headers,
    resets,
    rst,
)
from tests.extproc.messages import body, head
from tests.extproc.serving.asking import Asking
from tests.extproc.serving.running import PROCESS, PROMPT, Running
from tests.oracles.http2.frames import PREFACE, FrameType, ping, settings, window_update
from tests.oracles.http2.grpc_messages import NOT_GRPC, framed
from tests.ports import free_port
from tests.waiting import until

DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
CHECK = "/grpc.health.v1.Health/Check"
GREETING = PREFACE + settings({})
HEAD = framed(head("/v1/completions").SerializeToString())
BODY = framed(body(PROMPT).SerializeToString())
LIMITS = Limits(stall_ticks=2, preface_ticks=2)


def request(number: int, path: str = PROCESS, **more: str) -> bytes:
    """HEADERS of a call."""
    fields = {"content-type": "application/grpc", "te": "trailers", **more}
    pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode())]
    return headers(
        number, [*pseudo, *((name.encode(), value.encode()) for name, value in fields.items())]
    )


class Peer:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.got = b""

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def frames_until(self, is_enough: Callable[[list[Sent]], bool]) -> list[Sent]:
        """Returns all whole frames that came until they are enough or the connection ends."""
        while True:
            frames = frames_of(self.got)
            if is_enough(frames):
                return frames
            more = await self.reader.read(65_536)
            if not more:
                return frames
            self.got += more

    async def ended(self) -> list[Sent]:
        """Returns all frames until the connection ends."""
        try:
            return await self.frames_until(lambda _: False)
        except ConnectionResetError:
            return frames_of(self.got)

    async def answer_to_ping(self) -> list[Sent]:
        """Sends a PING; returns all frames up to its answer: what came before it was read."""
        self.send(ping(b"are you?"))
        return await self.frames_until(
            lambda frames: any(one.kind == FrameType.PING for one in frames)
        )


Connect = Callable[[], Awaitable[Peer]]


@pytest.fixture
def bounds() -> ServerBounds:
    return USUAL


def bounded(**bounds: float) -> pytest.MarkDecorator:
    """Has the server of a test bound its peers otherwise."""
    return pytest.mark.parametrize("bounds", [ServerBounds(**bounds)])  # type: ignore[arg-type]


@pytest.fixture
async def running(tmp_path: Path, bounds: ServerBounds) -> AsyncIterator[Running]:
    one = Running(f"unix:{tmp_path}/socket")
    one.server = LeanServer(one.service, lambda: one.ready, LIMITS, bounds=bounds)
    await one.server.start()
    yield one
    await one.stop()


@pytest.fixture
async def connect(running: Running) -> AsyncIterator[Connect]:
    peers: list[Peer] = []

    async def connecting() -> Peer:
        path = running.listen.removeprefix("unix:")
        peers.append(Peer(*await asyncio.open_unix_connection(path)))
        return peers[-1]

    yield connecting
    for peer in peers:
        peer.writer.close()


def server_of(running: Running) -> LeanServer:
    return running.server


def statuses(frames: list[Sent]) -> list[bytes]:
    """The blocks of HEADERS that end an answer."""
    return [one.payload for one in frames if one.kind == FrameType.HEADERS and one.flags & 1]


async def test_messages_of_one_read_get_one_write(running: Running, connect: Connect) -> None:
    peer = await connect()
    peer.send(GREETING, request(1), data(1, HEAD), data(1, BODY), data(1, flags=END_STREAM))
    frames = await peer.frames_until(lambda frames: bool(statuses(frames)))
    kinds = [one.kind for one in frames if one.stream_id == 1]
    assert kinds == [FrameType.HEADERS, FrameType.DATA, FrameType.DATA, FrameType.HEADERS]
    assert b"grpc-status\x010" in statuses(frames)[0]
    assert running.in_flight == 0


async def answered(peer: Peer) -> None:
    """Sends a request's messages, and waits for both answers."""
    peer.send(GREETING, request(1), data(1, HEAD), data(1, BODY))
    await peer.frames_until(lambda frames: [one.kind for one in frames].count(FrameType.DATA) == 2)


@bounded(end_seconds=3_600.0)
async def test_end_of_a_stream_is_sent_with_the_next_answer(connect: Connect) -> None:
    peer = await connect()
    await answered(peer)
    peer.send(data(1, b"", flags=END_STREAM))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await peer.frames_until(lambda frames: statuses(frames) != [])
    frames = await peer.answer_to_ping()
    assert [one.kind for one in frames[-2:]] == [FrameType.HEADERS, FrameType.PING]


async def test_end_of_a_stream_is_sent_alone_where_no_answer_follows(connect: Connect) -> None:
    peer = await connect()
    await answered(peer)
    peer.send(data(1, b"", flags=END_STREAM))
    frames = await peer.frames_until(lambda frames: statuses(frames) != [])
    assert b"grpc-status\x010" in statuses(frames)[0]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (request(1, **{"grpc-encoding": "gzip"}), b"grpc-status\x0212"),
        (request(1, "/no/method"), b"grpc-status\x0212"),
        (request(1, CHECK) + data(1, flags=END_STREAM), b"grpc-status\x0213"),
        (request(1, CHECK) + data(1, framed(b"") * 2, flags=END_STREAM), b"grpc-status\x0213"),
        (request(1, CHECK) + data(1, framed(b"\xff"), flags=END_STREAM), b"grpc-status\x0213"),
        (request(1) + data(1, HEAD[:9], flags=END_STREAM), b"grpc-status\x0213"),
        (request(1) + data(1, b"\x01\0\0\0\0"), b"grpc-status\x0212"),
        (request(1) + data(1, b"\0\xff\xff\xff\xff"), b"grpc-status\x018"),
    ],
)
async def test_unserved_call_ends_with_its_status(
    connect: Connect, sent: bytes, expected: bytes
) -> None:
    peer = await connect()
    peer.send(GREETING, sent)
    frames = await peer.frames_until(lambda frames: bool(statuses(frames)))
    assert expected in statuses(frames)[0]


async def test_request_that_is_not_of_grpc_is_told_what_the_port_serves(connect: Connect) -> None:
    peer = await connect()
    peer.send(GREETING, request(1, **{"content-type": "text/plain"}))
    frames = [one for one in await peer.answer_to_ping() if one.stream_id == 1]
    assert [(one.kind, one.flags) for one in frames[:3]] == [
        (1, END_HEADERS),
        (0, 0),
        (0, END_STREAM),
    ]
    assert b":status\x03415" in frames[0].payload
    assert frames[1].payload == NOT_GRPC


async def test_call_without_a_body_ends(connect: Connect) -> None:
    peer = await connect()
    whole = END_HEADERS | END_STREAM
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", PROCESS.encode())]
    fields += [(b"content-type", b"application/grpc")]
    peer.send(GREETING, headers(1, fields, flags=whole))
    frames = await peer.frames_until(lambda frames: bool(statuses(frames)))
    assert b"grpc-status\x010" in statuses(frames)[0]


async def test_broken_connection_gets_goaway_and_others_continue(
    running: Running, connect: Connect
) -> None:
    good, bad = await connect(), await connect()
    good.send(GREETING, request(1), data(1, HEAD), data(1, BODY))
    bad.send(GREETING, request(1), data(1, HEAD), data(1, BODY))
    await until(lambda: running.in_flight == 2)
    bad.send(window_update(0, 0), request(3))
    last = (await bad.ended())[-1]
    assert last.kind == FrameType.GOAWAY
    assert last.payload[7] == ErrorCode.PROTOCOL_ERROR
    assert running.in_flight == 1
    assert await good.answer_to_ping()


async def test_connection_of_another_protocol_gets_goaway(connect: Connect) -> None:
    peer = await connect()
    peer.send(b"GET / HTTP/1.1\r\n\r\n")
    assert (await peer.ended())[-1].kind == FrameType.GOAWAY


async def test_reset_and_half_close_release_the_load_once(
    running: Running, connect: Connect
) -> None:
    peer = await connect()
    peer.send(GREETING, request(1), data(1, HEAD), data(1, BODY), request(3), data(3, HEAD + BODY))
    await peer.answer_to_ping()
    assert running.in_flight == 2
    peer.send(rst(1), data(3, flags=END_STREAM), rst(3))
    await until(lambda: running.in_flight == 0)
    assert b"kvsteer_open_streams 0.0" in generate_latest(running.metrics)


async def test_deadlines_end_silent_peers_and_calls(running: Running, connect: Connect) -> None:
    silent, peer = await connect(), await connect()
    peer.send(GREETING, request(1), request(3), data(3, HEAD[:9]), request(5), data(5, HEAD))
    await peer.answer_to_ping()
    for _ in range(3):
        server_of(running).tick()
    assert (await silent.ended())[-1].payload[7] == ErrorCode.SETTINGS_TIMEOUT
    frames = await peer.frames_until(lambda frames: len(statuses(frames)) == 2)
    assert all(b"grpc-status\x014" in one for one in statuses(frames))
    assert {number for number, _ in resets(frames)} == {1, 3}


async def test_stream_whose_answers_stay_unread_is_reset(
    running: Running, connect: Connect
) -> None:
    peer = await connect()
    peer.send(PREFACE, settings({4: 0}), request(1), data(1, HEAD + BODY))
    await peer.answer_to_ping()
    assert running.in_flight == 1
    for _ in range(3):
        server_of(running).tick()
    assert running.in_flight == 0
    frames = await peer.frames_until(lambda frames: bool(resets(frames)))
    assert resets(frames) == [(1, ErrorCode.CANCEL)]


def echoed(part: bytes) -> bytes:
    return framed(body(part, end_of_stream=False).SerializeToString())


async def test_peer_that_reads_no_answers_is_read_up_to_its_window(
    running: Running, connect: Connect
) -> None:
    peer = await connect()
    duplex = framed(head("/metrics", mode=DUPLEX).SerializeToString())
    peer.send(PREFACE, settings({4: 0}), request(1), data(1, duplex))
    part = echoed(bytes(16_000))
    for _ in range(90):
        peer.send(data(1, part))
    frames = await peer.answer_to_ping()
    updates = [one for one in frames if (one.kind, one.stream_id) == (FrameType.WINDOW_UPDATE, 1)]
    assert len(updates) <= 2
    held = server_of(running).figures().buffered_bytes
    assert 1_000_000 < held < 4_000_000
    peer.send(window_update(1, 2**24), window_update(0, 2**24), data(1, flags=END_STREAM))
    frames = await peer.frames_until(lambda frames: bool(statuses(frames)))
    sent = sum(len(one.payload) for one in frames if one.kind == FrameType.DATA)
    assert sent > 90 * 16_000
    assert server_of(running).figures().buffered_bytes == 0


@bounded(max_bytes=30_000)
async def test_budget_bounds_the_bodies_of_all_connections(
    running: Running, connect: Connect
) -> None:
    first, second = await connect(), await connect()
    for peer in (first, second):
        peer.send(GREETING, request(1), data(1, b"\0\0\0\xff\xff" + bytes(15_000)))
    both = await asyncio.gather(first.answer_to_ping(), second.answer_to_ping())
    ended = [one for frames in both for one in statuses(frames)]
    assert len(ended) == 1
    assert b"grpc-status\x018" in ended[0]


@pytest.mark.slow
async def test_peer_that_reads_nothing_is_not_read(running: Running) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.setblocking(False)
        deaf.connect(running.listen.removeprefix("unix:"))
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(deaf, GREETING)
        flooding = asyncio.create_task(flood(deaf))
        server = server_of(running)

        def is_closed() -> bool:
            server.tick()
            return server.figures().connections == 0

        await until(is_closed)
        with pytest.raises(OSError, match=r"."):
            await flooding


async def flood(deaf: socket.socket) -> None:
    """Sends valid requests for ever, and never reads."""
    loop = asyncio.get_running_loop()
    small = framed(ProcessingRequest(request_headers={}).SerializeToString())
    number = 1
    while True:
        await loop.sock_sendall(deaf, request(number) + data(number, small, flags=END_STREAM))
        number += 2


class Later(Asking):
    """An exchange that answers once its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.taken = 0
        self.closed = 0
        self.fault: BaseException | None = None

    async def receive(self, _: ProcessingRequest) -> list[bytes]:
        self.taken += 1
        await asyncio.sleep(0)  # yields first, so that the server continues it in a task
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        answers = ProcessingResponse(request_headers={}), ProcessingResponse(request_body={})
        return [answer.SerializeToString() for answer in answers]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def later(running: Running) -> Later:
    one = Later()
    running.service.exchange = cast("Exchange", one)
    return one


async def test_message_waits_for_the_answer_before_it(connect: Connect, later: Later) -> None:
    peer = await connect()
    peer.send(GREETING, request(1), data(1, HEAD), data(1, BODY, flags=END_STREAM))
    await peer.answer_to_ping()
    assert (later.taken, later.closed) == (1, 0)
    later.gate.set()
    frames = await peer.frames_until(lambda frames: bool(statuses(frames)))
    assert len([one for one in frames if one.kind == FrameType.DATA]) == 4
    assert (later.taken, later.closed) == (2, 1)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (ProtocolError("no"), b"grpc-status\x013"),
        (ValueError("secret"), b"grpc-status\x0213"),
        (asyncio.CancelledError(), b"grpc-status\x0213"),
    ],
)
async def test_awaited_answer_may_fail(
    connect: Connect, later: Later, fault: BaseException, status: bytes
) -> None:
    peer = await connect()
    later.fault = fault
    later.gate.set()
    peer.send(GREETING, request(1), data(1, HEAD))
    frames = await peer.frames_until(lambda frames: bool(statuses(frames)))
    assert status in statuses(frames)[0]
    assert b"secret" not in peer.got
    assert later.closed == 1


async def test_reset_stream_closes_before_its_answer(connect: Connect, later: Later) -> None:
    peer = await connect()
    peer.send(GREETING, request(1), data(1, HEAD), rst(1))
    await peer.answer_to_ping()
    assert later.closed == 1
    later.gate.set()
    await peer.answer_to_ping()
    assert later.closed == 1


@bounded(max_connections=1)
async def test_max_connections_refuses_a_further_one(running: Running, connect: Connect) -> None:
    first = await connect()
    first.send(GREETING, request(1), data(1, HEAD))
    await first.answer_to_ping()
    second = await connect()
    assert await second.ended() == []
    assert await first.answer_to_ping()
    assert server_of(running).figures().connections == 1


@bounded(max_connections=2)
async def test_max_connections_closes_an_unused_connection_first(
    running: Running, connect: Connect
) -> None:
    used, unused = await connect(), await connect()
    used.send(GREETING, request(1), data(1, flags=END_STREAM))
    unused.send(GREETING)
    await asyncio.gather(used.answer_to_ping(), unused.answer_to_ping())
    await connect()
    assert (await unused.ended())[-1].kind == FrameType.GOAWAY
    assert await used.answer_to_ping()
    assert server_of(running).figures().connections == 2


@bounded(max_connections=2)
async def test_max_connections_closes_the_connection_that_rests_longest(connect: Connect) -> None:
    older, younger = await connect(), await connect()
    for peer, number in ((older, 1), (younger, 1), (older, 3)):
        peer.send(GREETING if number == 1 else b"", request(number), data(number, flags=END_STREAM))
        await peer.answer_to_ping()
    await connect()
    assert (await younger.ended())[-1].kind == FrameType.GOAWAY
    older.send(ping(b"and now?"))
    await older.frames_until(lambda frames: frames[-1].payload == b"and now?")


@bounded(max_connections=1, linger_seconds=0.01)
async def test_closed_connection_ends_although_its_peer_reads_nothing(
    running: Running, connect: Connect
) -> None:
    deaf = await connect()
    await until(lambda: bool(server_of(running).connections))
    (connection,) = server_of(running).connections
    connection.transport.write(bytes(10**7))
    await connect()
    await until(lambda: connection not in server_of(running).connections)
    await until(lambda: connection.transport.get_extra_info("socket").fileno() == -1)
    deaf.writer.close()


@bounded(max_bytes=2 * OPEN_BYTES + 10)
async def test_call_beyond_the_limit_is_refused(running: Running, connect: Connect) -> None:
    peer = await connect()
    peer.send(GREETING, request(1), request(3))
    assert resets(await peer.answer_to_ping()) == [(3, ErrorCode.REFUSED_STREAM)]
    peer.send(rst(1), request(5), request(7, "/no/method"))
    await peer.answer_to_ping()
    assert server_of(running).figures().buffered_bytes == OPEN_BYTES


async def test_traceparent_of_a_stream_is_passed_on_where_traces_are_enabled(
    running: Running, connect: Connect
) -> None:
    running.service.is_traced = True
    peer = await connect()
    peer.send(GREETING, request(1, traceparent="00-1"), data(1, HEAD), request(3), data(3, HEAD))
    await peer.answer_to_ping()
    assert running.service.parents == ["00-1", ""]


def test_lean_server_runs_on_the_event_loop_of_the_router() -> None:
    async def request() -> int:
        one = Running(f"127.0.0.1:{free_port()}")
        await one.server.start()
        answer = await one.health("liveness")
        call = one.process()
        await call.write(head("/metrics"))
        await call.read()
        await one.stop()
        return answer

    assert event_loop.run(request()) == HealthCheckResponse.SERVING


async def test_metrics_count_connections_and_faults(running: Running, connect: Connect) -> None:
    good, bad = await connect(), await connect()
    good.send(GREETING, request(1))
    bad.send(GREETING, window_update(0, 0))
    await asyncio.gather(good.answer_to_ping(), bad.ended())
    bad.writer.close()
    server = server_of(running)
    await until(lambda: server.figures().connections == 1)
    assert server.figures() == (1, {"PROTOCOL_ERROR": 1}, OPEN_BYTES)


async def test_vanished_peer_is_detected() -> None:
    one = Running(f"127.0.0.1:{free_port()}")
    await one.server.start()
    host, port = one.listen.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    await until(lambda: bool(server_of(one).connections))
    (connection,) = server_of(one).connections
    connected = connection.transport.get_extra_info("socket")
    assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
    writer.close()
    await one.stop()


class Ticking:
    """A session whose checks for stalls are counted, and may fail."""

    def __init__(self, session: Session, *, fails: bool) -> None:
        self._session = session
        self._fails = fails
        self.ticks = 0

    def tick(self) -> object:
        self.ticks += 1
        if self._fails:
            raise RuntimeError("nobody thought of this")
        return self._session.tick()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@bounded(tick_seconds=0.01)
async def test_stall_check_that_fails_runs_again_and_stops_no_other(
    running: Running, connect: Connect
) -> None:
    for peer in [await connect(), await connect()]:
        peer.send(GREETING)
        await peer.answer_to_ping()
    sessions: list[Ticking] = []
    for connection in server_of(running).connections:
        sessions.append(Ticking(connection.session, fails=not sessions))
        connection.session = cast("Session", sessions[-1])
    failing, other = sessions
    await until(lambda: failing.ticks >= 4 and other.ticks >= 4)
    assert server_of(running).figures().faults[TICK_FAULT] == failing.ticks
