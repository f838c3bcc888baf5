"""The session against its oracle in Python: equal events, bytes and memory for any input."""

import sys
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from random import Random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc._core import Budget, Decoder
from extproc.http2.call_events import FAILED, MESSAGE
from extproc.http2.leftovers import FAULTY, KEPT_BACK, MORE, OVER
from extproc.http2.limits import Limits
from extproc.http2.messages import LONG_BYTES, LongMessage
from extproc.http2.method_decoder import MethodDecoder
from extproc.http2.session import Sessions
from extproc.serving.proxy_decoder import ProxyDecoder
from tests.extproc.http2.pair import KINDS, Pair
from tests.extproc.http2.peer import (
    END_HEADERS,
    END_STREAM,
    NO_TABLE,
    OPEN_BYTES,
    REQUEST,
    block_of,
)
from tests.extproc.messages import body, head
from tests.oracles.http2.budget import Budget as PlainBudget
from tests.oracles.http2.frames import PREFACE, FrameType, frame, settings, window_update
from tests.oracles.http2.grpc_messages import framed
from tests.oracles.http2.header_blocks import encode
from tests.oracles.http2.plain_session import PlainSessions

SMALL = Limits(
    max_streams=3,
    max_header_block_bytes=400,
    max_header_list_bytes=600,
    max_continuations=2,
    stream_window_bytes=200,
    connection_window_bytes=70_000,
    pings_a_tick=3,
    settings_a_tick=3,
    idle_frames_a_tick=6,
    idle_frames_a_stream=1,
    rapid_resets_a_tick=2,
    faults_a_tick=3,
    stall_ticks=1,
)
MAX_MESSAGE = 300
STREAMS = (1, 3, 5, 7, 9)


PATHS = ((b":path", b"/a"), (b":path", b"/" + b"b" * 40))
FIELDS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *REQUEST,
                *PATHS,
                (b"content-type", b"Application/grpc+proto;v=1"),
                (b"content-type", b"text/plain"),
                (b"grpc-encoding", b"gzip"),
                (b"content-length", b"12"),
                (b"content-length", b"x"),
                (b"traceparent", b"00-1"),
                (b":method", b"GET"),
                (b":method", b"HEAD"),
                (b"te", b"trailers"),
                (b"te", b"gzip"),
                (b"connection", b"close"),
                (b"x", b" y"),
                (b"X", b"y"),
                (b":status", b"200"),
            ]
        ),
        st.tuples(st.binary(max_size=5), st.binary(max_size=30)),
    ),
    max_size=8,
)
BLOCKS = st.one_of(
    st.just(block_of()),
    st.just(NO_TABLE + block_of()),
    st.just(encode([*REQUEST, (b"content-length", b"7")])),
    FIELDS.map(encode),
    FIELDS.map(lambda more: encode([*REQUEST, *more])),
    st.binary(max_size=60),
    # of a peer that uses the table: indexed and added fields, with and without Huffman codes
    st.just(bytes.fromhex("838684418cf1e3c2e5f23a6ba0ab90f4ff5f8b1d75d0620d263d4c4d6564")),
    st.just(bytes.fromhex("8386bebf") + encode(REQUEST[2:])),
    st.lists(
        st.sampled_from(
            (
                b"\x83",
                b"\x86",
                b"\x84",
                b"\xbe",
                b"\xbf",
                b"\xc0",
                b"\x20",
                b"\x80",
                b"\x40\x01x\x01y",
                b"\x40\x0ccontent-type\x10application/grpc",
                b"\x3f\x01",
                b"\x3f\xe1\x1f",
                b"\x44\x84\x60\x3f\x5f\xff",
                b"\x7f\x00\x03abc",
                b"\x10\x01a\x01b",
                b"\x40\x03abc\x7f\x81\x10" + b"v" * 256,
            )
        ),
        max_size=10,
    ).map(b"".join),
)
MESSAGES = st.one_of(
    st.binary(max_size=60).map(lambda text: framed(body(text).SerializeToString())),
    st.just(framed(head(headers={"x-user": "u"}).SerializeToString())),
    st.binary(max_size=60).map(framed),
    st.just(b"\x01\0\0\0\x02ab"),
    st.just(framed(b"x" * (MAX_MESSAGE + 1))),
    st.lists(st.binary(max_size=9).map(framed), max_size=4).map(b"".join),
    st.binary(max_size=20),
)
NUMBERS = st.sampled_from((0, *STREAMS, 2, 2**31 - 1))
FRAMES = st.one_of(
    st.builds(
        frame,
        st.just(int(FrameType.HEADERS)),
        st.sampled_from((END_HEADERS, END_HEADERS | END_STREAM, 0, 0x2C, 0x24, 0x0C)),
        st.sampled_from(STREAMS),
        BLOCKS,
    ),
    st.builds(
        frame, st.just(int(FrameType.DATA)), st.sampled_from((0, 0, 0, 1, 8, 9)), NUMBERS, MESSAGES
    ),
    st.builds(frame, st.just(int(FrameType.CONTINUATION)), st.integers(0, 5), NUMBERS, BLOCKS),
    st.builds(window_update, NUMBERS, st.sampled_from((0, 1, 40, 2**20, 2**31 - 1))),
    st.builds(
        lambda pairs: settings(dict(pairs)),
        st.lists(
            st.tuples(st.integers(0, 7), st.sampled_from((0, 1, 2, 30, 16_384, 2**31))), max_size=3
        ),
    ),
    st.builds(
        frame,
        st.integers(2, 10),
        st.integers(0, 63),
        NUMBERS,
        st.one_of(st.just(bytes(4)), st.just(bytes(5)), st.just(bytes(8)), st.binary(max_size=12)),
    ),
    st.binary(max_size=12),
)
ACK = frame(FrameType.SETTINGS, 1, 0)
ACTIONS = st.one_of(
    st.tuples(st.just("receive"), FRAMES),
    st.tuples(st.just("receive"), FRAMES),
    st.tuples(st.just("receive"), FRAMES),
    st.tuples(st.just("receive"), st.just(ACK)),
    st.tuples(st.just("answer"), st.sampled_from(STREAMS), st.binary(max_size=80)),
    st.tuples(
        st.just("answer"),
        st.sampled_from(STREAMS),
        st.tuples(
            st.binary(max_size=9),
            st.just(bytes(range(60))),
            st.integers(0, 60),
            st.binary(max_size=9),
        ).map(LongMessage._make),
    ),
    st.tuples(
        st.just("finish"),
        st.sampled_from(STREAMS),
        st.sampled_from((0, 0, 3, 13)),
        st.sampled_from(("", "no % here", "ä\ud800")),
    ),
    st.tuples(st.sampled_from(("hold", "unhold", "queued")), st.sampled_from(STREAMS)),
    st.tuples(st.sampled_from(("pause_sending", "resume_sending", "drain", "tick"))),
)


@given(
    st.lists(ACTIONS, min_size=1, max_size=40),
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
    st.sampled_from((0, 20_000, 2**30)),
    st.booleans(),
)
def test_session_does_what_its_oracle_does(
    actions: Sequence[tuple[object, ...]], sizes: list[int], max_bytes: int, greets: bool
) -> None:
    pair = Pair(SMALL, MAX_MESSAGE, max_bytes)
    pair.receive(PREFACE + settings({}) if greets else PREFACE[:9])
    kept, turn = b"", 0
    for name, *arguments in actions:
        if name == "receive":
            kept += bytes(arguments[0])  # type: ignore[call-overload]
            while len(kept) >= sizes[turn % len(sizes)]:
                size = sizes[turn % len(sizes)]
                pair.receive(kept[:size])
                kept, turn = kept[size:], turn + 1
            continue
        pair.receive(kept)
        kept = b""
        pair.do(str(name), *arguments)
        pair.compare()
    pair.receive(kept)
    pair.do("close")
    pair.compare()
    assert pair.sessions[0].budget.used_bytes == 0


@pytest.mark.parametrize("most", [10_000, 2_049])
def test_calls_take_more_of_the_budget_from_their_first_message_on(most: int) -> None:
    pair = opened(most)
    assert pair.sessions[0].budget.used_bytes == OPEN_BYTES
    pair.receive(frame(FrameType.DATA, 0, 1, framed(b"")))
    kinds = [kind for _, kind, _ in pair.events]
    used_bytes = pair.sessions[0].budget.used_bytes
    assert (kinds[-1], used_bytes) == ((MESSAGE, 4096) if most == 10_000 else (FAILED, OPEN_BYTES))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 400)), max_size=60))
def test_budget_is_shared_as_its_oracle_is(
    actions: list[tuple[int, bool, int]],
) -> None:
    wholes: list[Budget | PlainBudget] = [Budget(1000), PlainBudget(1000)]
    shares = [[whole.share() for _ in range(3)] for whole in wholes]
    for number, takes, size in actions:
        told = []
        for whole, each in zip(wholes, shares, strict=True):
            share = each[number]
            if takes:
                told.append((share.take(size), share.used_bytes, whole.used_bytes))
            else:
                share.give_back(min(size, share.used_bytes))
                told.append((True, share.used_bytes, whole.used_bytes))
        assert told[0] == told[1]


class Client:
    """A client that mostly keeps the rules: it sends whole frames on streams that it has opened."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.last = -1
        self.forbids_table = False
        self.unsent = b""
        self.frames_a_read = 1
        self._waiting = 0

    def do(self, action: str, at: int, content: bytes) -> None:
        """Sends a frame, or has the sessions do something, on one of the last streams."""
        if action == "open":
            self.last += 2
        stream_id = self.last - 2 * at if self.last > 2 * at else 1
        sent = self.frame_of(action, stream_id, content)
        if sent is not None:
            self.send(sent)
        elif action == "answer":
            self.call("answer", stream_id, content * 20)
        elif action == "long":
            long = LongMessage(content, content * 20, len(content) * 19, content[:at])
            self.call("answer", stream_id, long)
        elif action == "finish":
            self.call("finish", stream_id, at, content.decode("latin-1"))
        elif action in ("hold", "unhold", "queued"):
            self.call(action, stream_id)
        else:
            self.call(action)

    def frame_of(self, action: str, stream_id: int, content: bytes) -> bytes | None:
        padding = len(content) % 256
        frames = {
            "open": lambda: self.opening(stream_id, content),
            "data": lambda: frame(FrameType.DATA, 0, stream_id, content),
            "last": lambda: frame(FrameType.DATA, END_STREAM, stream_id, content),
            "padded": lambda: frame(
                FrameType.DATA, 8, stream_id, bytes([padding]) + content + bytes(padding)
            ),
            "reset": lambda: frame(FrameType.RST_STREAM, 0, stream_id, bytes(4)),
            "window": lambda: window_update(0, 50) + window_update(stream_id, 50),
            "initial": lambda: settings({4: 20 * len(content)}),
        }
        return frames[action]() if action in frames else None

    def opening(self, stream_id: int, content: bytes) -> bytes:
        is_traced, is_other = content[-1:] > b"\x80", content[-1:] > b"\xc0"
        trace = content.hex().encode() if content[-2:-1] > b"\x80" else b"00-1"
        fields = [*REQUEST[:2], PATHS[0], REQUEST[3]] if is_other else REQUEST
        block = encode([*fields, *[(b"traceparent", trace)] * is_traced])
        if self.forbids_table:
            block, self.forbids_table = NO_TABLE + block, False
        is_last = content[-1:] < b"\x10"
        return frame(FrameType.HEADERS, END_HEADERS | END_STREAM * is_last, self.last, block)

    def send(self, data: bytes) -> None:
        """Sends these bytes, but keeps the end of them until more follow.

        Several frames are sent at once, as `frames_a_read` says.
        """
        self.unsent += data
        self._waiting += 1
        if self._waiting < self.frames_a_read:
            return
        self._waiting = 0
        size = len(self.unsent) - self.unsent[-1] % 5
        self.pair.receive(self.unsent[:size])
        self.unsent = self.unsent[size:]

    def call(self, name: str, *arguments: object) -> None:
        self.pair.do(name, *arguments)
        self.pair.compare()


DONE = (
    "open",
    "open",
    "data",
    "data",
    "data",
    "last",
    "padded",
    "reset",
    "window",
    "initial",
    "answer",
    "answer",
    "long",
    "finish",
    "hold",
    "unhold",
    "queued",
    "pause_sending",
    "resume_sending",
    "resume_sending",
    "tick",
)
TURNS = 50

Heads = Sequence[tuple[bytes, bytes]]


def some_message(rng: Random) -> bytes:
    """A message, two of them, or a part of one; seldom one that ends its call."""
    size = rng.choice((0, 1, 20, 90, 400)) if rng.random() < 0.1 else rng.randrange(60)
    whole = framed(rng.randbytes(min(size, MAX_MESSAGE + 1)))
    if rng.random() < 0.3:
        whole = framed(body(rng.randbytes(rng.randrange(40))).SerializeToString())
    kind = rng.randrange(8)
    if kind == 0:
        return b"\x01" + whole[1:]
    if kind <= 2:
        return whole[: rng.randrange(len(whole))]
    return whole * (1 + (kind == 3))


@given(st.integers(0, 2**32))
def test_sessions_serve_a_client_alike(seed: int) -> None:
    rng = Random(seed)
    limits = Limits(stream_window_bytes=400, connection_window_bytes=70_000, stall_ticks=1)
    client = Client(Pair(limits, MAX_MESSAGE, rng.choice((9_000, 13_000, 2**30))))
    client.send(PREFACE + settings({4: 100}))
    client.frames_a_read = rng.choice((1, 1, 2, 5))
    if rng.random() < 0.5:  # then equal blocks are not decoded again
        client.send(ACK)
        client.forbids_table = True
    client.do("open", 0, b"")
    for _ in range(TURNS):
        client.do(rng.choice(DONE), rng.randrange(3), some_message(rng))
    if rng.random() < 0.5:
        client.call("drain")
        client.do("open", 0, b"")
    client.call("close")
    assert client.pair.sessions[0].budget.used_bytes == 0


@given(st.lists(st.integers(997, 300_000), min_size=1, max_size=6))
def test_long_message_comes_in_parts_however_it_is_split(sizes: list[int]) -> None:
    pair = Pair(Limits(), 4 * LONG_BYTES, 2**30)
    pair.receive(PREFACE + settings({}) + frame(FrameType.HEADERS, END_HEADERS, 1, block_of()))
    # parts are never read, even of a message that could be
    content = body(bytes(range(256)) * (LONG_BYTES // 256) + b"end").SerializeToString()
    message = framed(content)
    sent = b"".join(
        frame(FrameType.DATA, 0, 1, message[at : at + 16_384])
        for at in range(0, len(message), 16_384)
    )
    at = turn = 0
    while at < len(sent):
        size = sizes[turn % len(sizes)]
        pair.receive(sent[at : at + size])
        at, turn = at + size, turn + 1
    parts = pair.events[1:]
    assert [kind == MESSAGE for _, kind, _ in parts] == [False] * (len(parts) - 1) + [True]
    assert b"".join(bytes(part) for _, _, part in parts) == content  # type: ignore[call-overload]


def opened(max_bytes: int, fields: Sequence[tuple[bytes, bytes]] = REQUEST) -> Pair:
    """Two sessions with one request."""
    pair = Pair(Limits(), MAX_MESSAGE, max_bytes)
    pair.receive(PREFACE + settings({}))
    pair.receive(frame(FrameType.HEADERS, END_HEADERS, 1, encode(fields)))
    return pair


@pytest.mark.parametrize(
    "field",
    [
        (b":method", b"GET"),
        (b":method", b"HEAD"),
        (b"content-type", b"text/plain"),
        (b"content-type", b"application/grpcx"),
        (b"grpc-encoding", b"gzip"),
    ],
)
def test_request_that_is_no_call_is_refused_alike(field: tuple[bytes, bytes]) -> None:
    fields = {**dict(REQUEST), field[0]: field[1]}
    pair = opened(2**30, list(fields.items()))
    assert (pair.events, pair.both[0].stream_count) == ([], 0)


@pytest.mark.parametrize(
    ("max_bytes", "is_sent"),
    [(OPEN_BYTES + 64, True), (OPEN_BYTES + 63, False), (OPEN_BYTES - 1, False)],
)
def test_content_of_a_refusal_waits_alike_for_the_window(max_bytes: int, *, is_sent: bool) -> None:
    pair = Pair(Limits(), MAX_MESSAGE, max_bytes)
    fields = [(b":method", b"GET"), *REQUEST[1:]]
    sent = frame(FrameType.HEADERS, END_HEADERS | END_STREAM, 1, encode(fields))
    pair.receive(PREFACE + settings({4: 0}) + sent)
    used_bytes = pair.sessions[0].budget.used_bytes
    assert (pair.both[0].stream_count, used_bytes) == ((1, max_bytes) if is_sent else (0, 0))
    for credit in (10, 1000):
        pair.receive(window_update(1, credit))
    assert (pair.both[0].stream_count, pair.sessions[0].budget.used_bytes) == (0, 0)


def test_request_that_is_refused_and_reset_in_one_read_keeps_nothing() -> None:
    pair = Pair(Limits(), MAX_MESSAGE, 2**30)
    sent = frame(FrameType.HEADERS, END_HEADERS, 1, encode([(b":method", b"GET"), *REQUEST[1:]]))
    pair.receive(PREFACE + settings({4: 0}) + sent + frame(FrameType.RST_STREAM, 0, 1, bytes(4)))
    assert (pair.events, pair.sessions[0].budget.used_bytes) == ([], 0)


def test_data_read_with_the_head_of_a_refused_request_is_ignored_alike() -> None:
    pair = Pair(Limits(), MAX_MESSAGE, 2**30)
    sent = frame(FrameType.HEADERS, END_HEADERS, 1, encode([(b":method", b"GET"), *REQUEST[1:]]))
    pair.receive(PREFACE + settings({4: 0}) + sent + frame(FrameType.DATA, 0, 1, bytes(100)))
    assert (pair.events, pair.both[0].stream_count) == ([], 1)


@pytest.mark.parametrize("end", ["close", "tick"])
def test_refusal_that_is_not_read_is_given_up_alike(end: str) -> None:
    pair = Pair(SMALL, MAX_MESSAGE, 2**30)
    sent = frame(FrameType.HEADERS, END_HEADERS, 1, encode([(b":method", b"GET"), *REQUEST[1:]]))
    pair.receive(PREFACE + settings({4: 0}) + sent)
    assert pair.sessions[0].budget.used_bytes == OPEN_BYTES + 64
    for _ in range(3):
        pair.do(end)
        pair.compare()
    assert (pair.both[0].stream_count, pair.sessions[0].budget.used_bytes) == (0, 0)


def test_call_fails_alike_without_memory_for_its_message() -> None:
    pair = opened(OPEN_BYTES + 20)
    pair.receive(frame(FrameType.DATA, 0, 1, framed(bytes(90))[:40]))
    pair.receive(frame(FrameType.DATA, 0, 1, b"more"))
    assert pair.events[1:] == [(1, FAILED, (8, "no memory left for unfinished messages"))]
    assert pair.sessions[0].budget.used_bytes == OPEN_BYTES


@pytest.mark.parametrize("sent", [b"", framed(b"a")[:4]])
def test_call_without_its_first_message_ends_at_the_second_tick(sent: bytes) -> None:
    pair = opened(2**30)
    pair.receive(frame(FrameType.DATA, 0, 1, sent))
    assert pair.do("tick") == []
    assert pair.do("tick") == [(1, FAILED, (4, "no message in time"))]


def test_answer_that_waits_for_a_window_is_sent_in_whole_frames() -> None:
    pair = Pair(Limits(), 100, 2**30)
    pair.receive(PREFACE + settings({4: 0}) + frame(FrameType.HEADERS, END_HEADERS, 1, block_of()))
    assert pair.do("answer", 1, bytes(40_000)) == 40_005
    pair.do("answer", 1, bytes(10))
    pair.do("finish", 1, 0, "")
    pair.receive(window_update(1, 2**20))
    pair.receive(window_update(0, 2**20))
    assert pair.both[0].stream_count == 0
    assert pair.sessions[0].budget.used_bytes == 0


LENT = LongMessage(b"begin", bytes(100_000), 90_000, b"end")
RESET = frame(FrameType.RST_STREAM, 0, 1, bytes(4))


@pytest.mark.parametrize(
    "end",
    [
        [("receive", window_update(1, 2**20) + window_update(0, 2**20))],
        [("receive", window_update(1, 2**20) + RESET)],
        [("answer", 1, LENT), ("receive", window_update(1, 95_000)), ("close",)],
        [("tick",)] * 7,
        [("close",), ("answer", 1, LENT)],
    ],
)
def test_long_answer_is_held_until_it_was_sent_or_its_call_has_ended(
    end: list[tuple[str, *tuple[object, ...]]],
) -> None:
    pair = Pair(Limits(), 100, 2**30)
    pair.receive(PREFACE + settings({4: 0}) + frame(FrameType.HEADERS, END_HEADERS, 1, block_of()))
    held = sys.getrefcount(LENT.body)
    queued = pair.do("answer", 1, LENT)
    kept = sys.getrefcount(LENT.body)
    assert (queued, kept) == (5 + 5 + 90_000 + 3, held + 1)
    for done in end:
        pair.do(*done)
        pair.compare()
    left = sys.getrefcount(LENT.body)
    pair.do("close")
    assert (left, pair.sessions[0].budget.used_bytes) == (held, 0)


def test_long_answer_without_room_is_given_back_and_ends_its_call() -> None:
    pair = opened(50_000)
    held = sys.getrefcount(LENT.body)
    queued = pair.do("answer", 1, LENT)
    left = sys.getrefcount(LENT.body)
    assert (queued, left, pair.both[0].stream_count) == (-1, held, 0)


@pytest.mark.parametrize("end", [-1, 101_000])
def test_long_answer_ends_within_its_body(end: int) -> None:
    pair = opened(2**30)
    with pytest.raises(ValueError, match="out of bounds"):
        pair.both[0].answer(1, LENT._replace(end=end))


def test_long_answer_takes_no_more_memory_than_its_body() -> None:
    pair, body = opened(2**30), bytes(128 * 2**20)  # none of it is resident before it is read
    before = _resident_pages()
    assert pair.both[0].answer(1, LongMessage(b"", body, len(body))) > 0
    assert _resident_pages() - before < 1000


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.parametrize("kind", KINDS)
def test_send_writes_a_mebibyte_at_a_time(kind: type[Sessions | PlainSessions]) -> None:
    one, written = kind(Limits(), 100, 2**30).open(), list[bytes]()
    greeting = PREFACE + settings({4: 2**24}) + window_update(0, 2**24)
    one.receive(greeting + frame(FrameType.HEADERS, END_HEADERS, 1, block_of()))
    one.answer(1, bytes(3 * 2**20))
    assert (one.send(written.append), len(written)) == (MORE, 4)
    assert (one.send(written.append), len(written)) == (MORE, 8)
    while one.send(written.append):
        pass
    assert sum(map(len, written)) > 3 * 2**20


def test_sessions_hold_back_alike_what_a_shrunken_window_no_longer_allows() -> None:
    greeting = PREFACE + settings({4: 2**20})
    pair = Pair(Limits(), 100, 2**30)
    pair.receive(greeting + frame(FrameType.HEADERS, END_HEADERS, 1, block_of()))
    pair.do("answer", 1, bytes(16_000))
    pair.do("answer", 1, bytes(60_000))
    pair.compare()
    pair.receive(settings({4: 10}))
    pair.receive(window_update(0, 2**20))
    assert pair.both[0].queued(1) == 16_005 + 60_005 - 65_535


@pytest.mark.parametrize("kind", KINDS)
def test_send_writes_what_is_due_and_returns_what_is_left(
    kind: type[Sessions | PlainSessions],
) -> None:
    one, written = kind(Limits(), 100, 2**30).open(), list[bytes]()
    assert (one.send(written.append), len(written)) == (0, 1)
    one.receive(PREFACE + settings({}) + frame(FrameType.HEADERS, END_HEADERS, 1, block_of()))
    one.receive(frame(FrameType.DATA, END_STREAM, 1))
    one.answer(1, b"a")
    assert (one.send(written.append), len(written)) == (0, 2)
    one.finish(1, 0, "")
    assert (one.send(written.append), len(written)) == (KEPT_BACK, 2)
    one.drain()
    assert (one.send(written.append), len(written)) == (OVER, 3)
    one.receive(frame(FrameType.DATA, 0, 0, b"x"))
    assert (one.send(written.append), len(written)) == (OVER | FAULTY, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_send_passes_on_an_error_of_its_writer(kind: type[Sessions | PlainSessions]) -> None:
    one = kind(Limits(), 100, 2**30).open()

    def fail(_: bytes) -> None:
        raise OSError("closed")

    with pytest.raises(OSError, match="closed"):
        one.send(fail)
    assert one.send(fail) == 0


def test_session_reads_whole_messages_of_its_path_alone() -> None:
    pair = opened(2**30)
    sent = body(b"{}").SerializeToString()
    pair.receive(frame(FrameType.DATA, 0, 1, framed(sent) + framed(b"\xff") + framed(sent)[:9]))
    pair.receive(frame(FrameType.DATA, 0, 1, framed(sent)[9:]))
    read = ProxyDecoder(()).decode(sent)
    assert pair.events[1:] == [(1, MESSAGE, read), (1, MESSAGE, b"\xff"), (1, MESSAGE, read)]
    other = opened(2**30, [*REQUEST[:2], (b":path", b"/other"), REQUEST[3]])
    other.receive(frame(FrameType.DATA, 0, 1, framed(sent)))
    assert other.events[1:] == [(1, MESSAGE, sent)]


PROCESS = [*REQUEST, (b"traceparent", b"00-1")]
CHECK = [*REQUEST[:2], (b":path", b"/grpc.health.v1.Health/Check"), REQUEST[3]]
TRACED = [*REQUEST, (b"traceparent", b"00-" + b"2" * 40)]


@pytest.mark.parametrize("heads", list(permutations((PROCESS, CHECK, TRACED, REQUEST), 3)))
def test_heads_of_one_read_keep_their_own_texts(heads: Sequence[Heads]) -> None:
    pair = Pair(Limits(), MAX_MESSAGE, 2**30)
    # the first is decoded and kept: the same block in the next read is not decoded again
    sent = [NO_TABLE + encode(heads[0]), *map(encode, (heads[0], *heads, heads[1]))]
    frames = [
        frame(FrameType.HEADERS, END_HEADERS, 2 * n + 1, block) for n, block in enumerate(sent)
    ]
    pair.receive(PREFACE + settings({}) + ACK + frames[0] + frames[1])
    pair.receive(b"".join(frames[2:]))
    told = [content for _, _, content in pair.events]
    assert told == [
        (dict(one)[b":path"], dict(one).get(b"traceparent", b""))
        for one in (heads[0], heads[0], *heads, heads[1])
    ]


def test_session_wants_a_compiled_decoder() -> None:
    wrong = MethodDecoder(b"/", cast("Decoder", "none"))
    with pytest.raises(TypeError, match="compiled decoder"):
        Sessions(Limits(), 1, 1, wrong).open()
