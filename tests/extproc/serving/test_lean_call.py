"""A call of the lean server, in any order of frames, timeouts and answers."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import ProtocolError
from extproc.http2.limits import MIB, Limits
from extproc.http2.messages import LONG_BYTES, MessageParts
from extproc.http2.session import Sessions
from extproc.pb.kvsteer_ext_proc_pb2 import HttpBody, ProcessingRequest
from extproc.serving import lean_call
from extproc.serving.exchange import Service
from extproc.serving.lean_call import ExtProcCall
from extproc.serving.lean_server import Host, LeanConnection
from extproc.serving.peers import Peers
from extproc.serving.proxy_decoder import ProxyDecoder
from extproc.serving.proxy_message import ProxyMessage
from extproc.serving.server_bounds import USUAL
from tests.extproc.http2.peer import END_STREAM, Sent, data, frames_of, headers, rst
from tests.extproc.serving.asking import Asking
from tests.oracles.http2.frames import PREFACE, FrameType, settings, window_update
from tests.oracles.http2.grpc_messages import framed
from tests.waiting import until

KINDS = ("echo", "twice", "silent", "wait", "hold", "wrong")
MORE = b"more"
STREAMS = 2
PIECE = 7
WHOLE_WINDOW = 2**20
PATIENCE_SECONDS = 60.0


class Answering(Asking):
    """An exchange that answers a message as its text says, if need be once it may go on.

    is_given_up: whether its request ended while it was held.
    """

    is_given_up = False

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.granted: list[bytes] = []
        self.opened = self.closed = 0
        self.faults: list[str] = []
        self.awaited: asyncio.Future[None] | None = None

    async def receive(self, message: ProxyMessage) -> list[bytes]:
        text = message.body
        if self.closed or self.awaited is not None:
            self.faults.append("it gets a message after its end, or before an answer")
        self.taken.append(text)
        if text.startswith(b"hold"):
            self.is_held = self.ask_for_time(1.0)
            self.granted += [text] * self.is_held
            self.is_given_up = self.is_held  # unless it goes on
        if text.startswith((b"wait", b"hold")):
            await asyncio.sleep(0)
            self.awaited = asyncio.get_running_loop().create_future()
            await self.awaited
            self.awaited, self.is_held, self.is_given_up = None, False, False
        if text.startswith(b"wrong"):
            raise ProtocolError("it is wrong")
        return answers_to(text)

    def more_time(self, seconds: float) -> list[bytes]:
        return [MORE]

    def go_on(self) -> None:
        """Lets an awaited answer come."""
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_result(None)

    def close(self) -> None:
        self.closed += 1


def answers_to(text: bytes) -> list[bytes]:
    if text.startswith(b"silent"):
        return []
    return [text] * (2 if text.startswith(b"twice") else 1)


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, written: object) -> None:
        self.data += bytes(cast("bytes", written))

    def close(self) -> None:
        """Does nothing: there is no socket."""

    abort = close

    def can_write_eof(self) -> bool:
        return False


class Request:
    """One stream of the peer: what it has yet to send, and what it sent."""

    def __init__(self, number: int) -> None:
        self.id = 2 * number + 1
        self.unsent = b""
        self.texts: list[bytes] = []
        self.is_spoilt = False  # it may end in another way than with all answers and OK
        self.is_ended = False


class Play(logging.Handler):
    """A connection of one peer, and all of its calls; it also keeps what they log as errors."""

    def __init__(self, window: int, first: Sequence[Answering] = ()) -> None:
        super().__init__(logging.ERROR)
        self._first = list(first)
        self.errors: list[str] = []
        self.exchanges: list[Answering] = []
        self.requests: list[Request] = []
        self.written = Written()
        limits = Limits(stall_ticks=2, preface_ticks=2)
        sessions = Sessions(limits, MIB, 64 * MIB)
        self.budget = sessions.budget
        peers = Peers[LeanConnection](self.budget)
        self.connection = LeanConnection(
            Host(limits, USUAL, sessions, self.route, lambda _: None, lambda _: None, peers)
        )
        self.connection.connection_made(self.written)
        self.hear(PREFACE, settings({4: window}), window_update(0, 2**30))

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(record.getMessage())

    def route(self, wire: LeanConnection, stream_id: int, *_: bytes) -> ExtProcCall:
        metrics = SimpleNamespace(protocol_errors=SimpleNamespace(inc=lambda: None))
        self.exchanges.append(self._first.pop(0) if self._first else Answering())
        service = SimpleNamespace(
            metrics=metrics,
            decoder=ProxyDecoder(()),
            joining=None,
            open=partial(self.open, self.exchanges[-1]),
        )
        return ExtProcCall(wire, stream_id, cast("Service", service), "")

    def open(self, exchange: Answering, _: str) -> Answering:
        exchange.opened += 1
        return exchange

    def hear(self, *frames: bytes) -> None:
        self.connection.data_received(b"".join(frames))

    async def turn(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    async def do(self, event: str, at: int, amount: int) -> None:
        """Does one event to one of the requests."""
        if event == "tick":
            for one in self.requests:
                one.is_spoilt = True
            self.connection.tick()
        elif event == "turn":
            await self.turn()
        elif event == "open":
            if len(self.requests) < STREAMS:
                self.requests.append(Request(len(self.requests)))
                self.hear(headers(self.requests[-1].id))
        elif at < len(self.requests):
            self.do_to(self.requests[at], event, amount)

    def do_to(self, one: Request, event: str, amount: int) -> None:
        if event == "answer":
            self.exchanges[self.requests.index(one)].go_on()
        elif event == "window":
            self.hear(window_update(one.id, amount))
        elif one.is_ended:
            return
        elif event == "reset":
            one.is_spoilt = one.is_ended = True
            self.hear(rst(one.id))
        elif event == "send":
            self.hear(data(one.id, one.unsent[:amount]))
            one.unsent = one.unsent[amount:]
        elif event in ("last", "cut"):
            one.is_ended = True
            one.is_spoilt |= event == "cut"
            self.hear(data(one.id, one.unsent if event == "last" else b"", flags=END_STREAM))
        else:
            self.say(one, event)
            if amount > PIECE:
                self.do_to(one, "send", len(one.unsent))

    def say(self, one: Request, kind: str) -> None:
        """Has a request say one message more, which is sent later."""
        one.is_spoilt |= kind == "wrong"
        one.texts.append(kind.encode() + b" %d" % len(one.texts))
        message = ProcessingRequest(request_body=HttpBody(body=one.texts[-1]))
        one.unsent += framed(message.SerializeToString())

    async def finish(self) -> None:
        """Sends and answers everything that is left."""
        for one in self.requests:
            self.do_to(one, "last", 0)
            self.do_to(one, "window", WHOLE_WINDOW)
        for _ in range(max([len(one.texts) for one in self.requests], default=0) + 1):
            await self.turn()
            for exchange in self.exchanges:
                exchange.go_on()
        await self.turn()
        self.connection.tick()
        self.hear(window_update(0, 1))
        # ends are written with the next answer, or a little later
        await until(self.has_written_the_ends, "the ends are written", seconds=PATIENCE_SECONDS)

    def has_written_the_ends(self) -> bool:
        """Whether the answer to each request that ended well has its end."""
        answers = [self.frames(one) for one in self.requests if not one.is_spoilt]
        return all(frames and frames[-1].flags & END_STREAM for frames in answers)

    def frames(self, one: Request) -> list[Sent]:
        """The parts of a request's answer that were written."""
        kinds = (FrameType.HEADERS, FrameType.DATA)
        sent = frames_of(self.written.data)
        return [each for each in sent if each.stream_id == one.id and each.kind in kinds]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ("open", "send", "last", "cut", "reset", "answer", "answer", "window", "turn", "tick")
            + KINDS * 3
        ),
        st.integers(0, STREAMS - 1),
        st.sampled_from((1, PIECE, 20, 200)),
    ),
    min_size=5,
    max_size=60,
)


async def played(events: Sequence[tuple[str, int, int]], window: int) -> Play:
    play = Play(window)
    lean_call.log.addHandler(play)
    for each in [("open", 0, 0), *events]:
        await play.do(*each)
    await play.finish()
    lean_call.log.removeHandler(play)
    return play


def assert_answer_is_whole(frames: Sequence[Sent]) -> None:
    """Asserts that an answer is a head, messages and one end, or a part of that from its begin."""
    kinds = [one.kind for one in frames]
    ends = [one for one in frames if one.flags & END_STREAM]
    assert ends in ([], frames[-1:])
    assert kinds[:1] in ([], [FrameType.HEADERS])
    middle = kinds[1:-1] if ends else kinds[1:]
    assert set(middle) <= {FrameType.DATA}


@given(EVENTS, st.sampled_from((0, 9, WHOLE_WINDOW)))
def test_call_keeps_its_promises_in_any_order(
    events: Sequence[tuple[str, int, int]], window: int
) -> None:
    play = asyncio.run(played(events, window))
    for one, exchange in zip(play.requests, play.exchanges, strict=True):
        assert not exchange.faults
        assert exchange.taken == one.texts[: len(exchange.taken)]
        assert exchange.closed == exchange.opened == bool(exchange.taken)
        frames = play.frames(one)
        assert_answer_is_whole(frames)
        if not one.is_spoilt:
            answers = [
                each
                for text in one.texts
                for each in (*([MORE] if text in exchange.granted else ()), *answers_to(text))
            ]
            expected = b"".join(map(framed, answers))
            said = b"".join(each.payload for each in frames if not each.kind)
            assert expected.startswith(said) if exchange.is_given_up else said == expected
            assert b"grpc-status\x010" in frames[-1].payload
    assert not play.errors
    assert play.budget.used_bytes == 0


@given(EVENTS)
def test_call_ends_once_when_its_connection_is_lost(events: Sequence[tuple[str, int, int]]) -> None:
    async def lost() -> Play:
        play = Play(WHOLE_WINDOW)
        for each in [("open", 0, 0), *events]:
            await play.do(*each)
        play.connection.connection_lost(None)
        for exchange in play.exchanges:
            exchange.go_on()
        await play.turn()
        return play

    play = asyncio.run(lost())
    assert [one.closed for one in play.exchanges] == [bool(one.taken) for one in play.exchanges]
    assert not any(one.faults for one in play.exchanges)
    assert play.budget.used_bytes == 0


class Early(Asking):
    """An exchange that awaits something before it runs in a task."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.opened = self.closed = 0

    async def receive(self, _: ProxyMessage) -> list[bytes]:
        if self.how == "late timeout":
            await asyncio.sleep(0)
        if self.how == "future":
            await asyncio.get_running_loop().create_future()
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()
        return []

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("how", ["timeout", "future", "late timeout"])
async def test_call_fails_loudly_where_an_exchange_waits_before_it_has_a_task(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    early, loop = Early(how), asyncio.get_running_loop()
    play = Play(WHOLE_WINDOW, [cast("Answering", early)])
    request = Request(0)
    play.say(request, "echo")
    # from the event loop, as a transport calls it: no task is running
    loop.call_soon(play.hear, headers(1), data(1, request.unsent))
    with caplog.at_level(logging.ERROR):
        await until(lambda: bool(early.closed))
    expected = "TimeoutError" if how == "late timeout" else "RuntimeError"
    expected = "TypeError" if how == "future" else expected
    assert f"stream ended by an internal error: {expected}" in caplog.text
    assert b"grpc-status\x0213" in play.frames(request)[-1].payload


async def test_parts_of_a_long_message_are_gone_once_it_was_joined() -> None:
    part, sizes = bytes(LONG_BYTES), list[int]()
    alone = sys.getrefcount(part)

    class Looking(Asking):
        async def receive(self, message: ProxyMessage) -> list[bytes]:
            # the thread drops what it has joined, too
            await until(lambda: sys.getrefcount(part) == alone, "gone")
            sizes.append(len(message.body))
            return []

    whole = HttpBody(body=bytes(2 * LONG_BYTES))
    begin = ProcessingRequest(request_body=whole).SerializeToString()[: -2 * LONG_BYTES]
    session = SimpleNamespace(unhold=int, answer=int)
    wire = cast("LeanConnection", SimpleNamespace(session=session, budget=None, flush=list))
    with ThreadPoolExecutor(1) as joining:
        made = SimpleNamespace(decoder=ProxyDecoder(()), joining=joining, open=lambda _: Looking())
        call = ExtProcCall(wire, 1, cast("Service", made), "")
        call.take(MessageParts([begin, part, part]))
        await until(lambda: bool(sizes))
    assert sizes == [2 * LONG_BYTES]
