"""Invalid frames, and good conversations corrupted: the core never fails, the server goes on."""

import asyncio
import random

import pytest
from hyperframe.frame import PingFrame
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc._core import Session
from extproc.http2.limits import Limits
from extproc.http2.session import Sessions
from tests.extproc.http2.peer import Sent, frames_of
from tests.extproc.messages import body, head
from tests.oracles.http2.frames import FrameType
from tests.oracles.http2.plain_session import PlainSession, PlainSessions
from tests.system.attacks.floods import CALL
from tests.system.attacks.peer import CALL as FIELDS
from tests.system.attacks.peer import (
    GREETING,
    block,
    data,
    headers,
    message,
    raw,
    reset,
    window_update,
)
from tests.system.attacks.rules import RULES
from tests.system.attacks.victim import Victim

SEED = 7_540

_DUPLEX = message(head("/v1/completions", mode=4, response_mode=4).SerializeToString())
_PARTS = [message(body(b"x" * 3000, end_of_stream=False).SerializeToString())] * 3

# What a proxy sends us: calls in both dialects, interleaved; a reset, and a slow call.
GOOD = [
    headers(1),
    data(1, CALL),
    headers(3),
    data(3, CALL[:40]),
    PingFrame(0, b"are you?").serialize(),
    data(1, last=True),
    data(3, CALL[40:]),
    headers(5, [*FIELDS, ("traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01")]),
    data(5, _DUPLEX),
    *[data(5, part) for part in _PARTS],
    reset(3),
    window_update(0, 1000),
    window_update(5, 1000),
    headers(7),
    data(7, CALL, last=True),
    headers(5, [("x-last", "1")], flags=("END_HEADERS", "END_STREAM")),
]

FRAMES = st.builds(
    raw,
    st.sampled_from(range(12)),
    st.integers(0, 255),
    st.sampled_from([0, 1, 1, 2, 3, 5, 7, 2**31 - 1, 2**32 - 1]),
    st.binary(max_size=40) | st.sampled_from([headers(1)[9:], bytes(4), bytes(8), CALL]),
)


KINDS: list[type[Sessions | PlainSessions]] = [Sessions, PlainSessions]


def told(session: Session | PlainSession) -> list[Sent]:
    """Everything that the session has to send."""
    found = b""
    while more := session.data_to_send():
        found += more
    return frames_of(found)


def codes(frames: list[Sent]) -> list[tuple[int, int, bytes]]:
    """The errors among the frames."""
    errors = (FrameType.RST_STREAM, FrameType.GOAWAY)
    return [(one.kind, one.stream_id, one.payload) for one in frames if one.kind in errors]


def fed(pieces: list[bytes], kind: type[Sessions | PlainSessions]) -> list[Sent]:
    """What a new session replies to these pieces; it keeps no memory after it is closed."""
    sessions = kind(Limits(), 2**20, 2**20)
    session = sessions.open()
    frames: list[Sent] = []
    for piece in pieces:
        session.receive(piece)
        frames += told(session)
    session.tick()
    frames += told(session)
    session.close()
    assert sessions.budget.used_bytes == 0
    assert sum(one.kind == FrameType.GOAWAY for one in frames) == (session.fault is not None)
    return frames


@pytest.mark.parametrize("kind", KINDS)
@given(
    frames=st.lists(
        FRAMES | st.sampled_from(GOOD) | st.sampled_from([rule.sent for rule in RULES]), max_size=30
    )
)
def test_session_answers_frames_alike_whole_and_in_pieces(
    frames: list[bytes], kind: type[Sessions | PlainSessions]
) -> None:
    sent = GREETING + b"".join(frames)
    if len(sent) > 40_000:
        sent = sent[:40_000]
    whole = fed([sent], kind)
    pieces = fed([sent[at : at + 7] for at in range(0, len(sent), 7)], kind)
    assert codes(pieces) == codes(whole)


_PATHS = (
    "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
    *(f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch")),
)
_TRACES = ((), (("traceparent", "00-1"),), (("traceparent", "00-" + "2" * 40),))

# Calls of several kinds and traces, in blocks that are decoded once if they are alike.
HEADS = [
    block([*FIELDS[:2], (":path", path), *FIELDS[3:], *trace], size_updates=0)
    for path in _PATHS
    for trace in _TRACES
]
# What comes of one stream: its head, and then DATA, its end, a reset, or nothing yet.
STREAMS = st.tuples(
    st.sampled_from(HEADS),
    st.sampled_from([b"", b"", CALL, CALL[:40], message(b"")]),
    st.sampled_from(["open", "open", "whole", "reset"]),
)


def stream_of(number: int, what: tuple[bytes, bytes, str]) -> bytes:
    """The frames of one stream."""
    block_of_it, sent, end = what
    frames = raw(1, 4, number, block_of_it) + (data(number, sent) if sent else b"")
    ends = {"open": b"", "whole": data(number, last=True), "reset": reset(number)}
    return frames + ends[end]


@given(
    reads=st.lists(st.lists(STREAMS, min_size=1, max_size=6), min_size=1, max_size=6),
    noise=st.lists(FRAMES, max_size=1),
)
def test_calls_of_several_kinds_in_one_read_are_told_as_they_were_sent(
    reads: list[list[tuple[bytes, bytes, str]]], noise: list[bytes]
) -> None:
    kinds = [one(Limits(), 2**20, 2**20).open() for one in KINDS]
    sent, number = [GREETING + headers(1)], 3
    for read in reads:
        frames = [stream_of(number + 2 * at, what) for at, what in enumerate(read)]
        number += 2 * len(read)
        sent.append(b"".join(frames))
    for part in [*sent, *noise, sent[-1]]:
        compiled, plain = (one.receive(part) for one in kinds)
        assert compiled == plain
    assert kinds[0].fault == kinds[1].fault


@pytest.mark.parametrize("kind", KINDS)
@given(noise=st.binary(max_size=300))
def test_session_survives_any_bytes(noise: bytes, kind: type[Sessions | PlainSessions]) -> None:
    fed([noise], kind)
    fed([GREETING, noise], kind)


def spoilt(rng: random.Random) -> bytes:
    """The good conversation, with frames or bytes lost, repeated, swapped, changed or cut."""
    frames = list(GOOD)
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(frames))
        other = rng.randrange(len(frames))
        what = rng.randrange(4)
        if what == 0:
            del frames[at]
        elif what == 1:
            frames.insert(other, frames[at])
        elif what == 2:
            frames[at], frames[other] = frames[other], frames[at]
        else:
            frames.insert(at, rng.choice(RULES).sent)
    sent = bytearray(GREETING + b"".join(frames))
    for _ in range(rng.randint(0, 6)):
        at = rng.randrange(24, len(sent))
        sent[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    return bytes(sent[: rng.randint(24, len(sent))] if rng.random() < 0.2 else sent)


async def talk(victim: Victim, sent: bytes, rng: random.Random) -> None:
    """Sends this in pieces; then aborts the connection, or reads until the other side ends it."""
    peer = await victim.connect()
    at = 0
    while at < len(sent):
        size = rng.choice((1, 9, 100, 100_000))
        peer.send(sent[at : at + size])
        at += size
        await asyncio.sleep(0)
    if rng.random() < 0.5:
        peer.close()
        return
    peer.half_close()
    await peer.ended()


async def talks(victim: Victim, count: int, seed: int) -> None:
    """Holds this many corrupted conversations, 20 at a time."""
    rng = random.Random(seed)
    async with victim.unharmed(may_grow_bytes=100 * 2**20):
        for _ in range(count // 20):
            some = [spoilt(rng) for _ in range(20)]
            await asyncio.gather(*(talk(victim, sent, rng) for sent in some))
            victim.leave()


async def test_corrupted_conversations_affect_no_other_peer(victim: Victim) -> None:
    await talks(victim, 300, SEED)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_thousands_of_corrupted_conversations_affect_no_other_peer(
    victim: Victim, seed: int
) -> None:
    await talks(victim, 2000, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3000)
@given(frames=st.lists(FRAMES | st.sampled_from(GOOD), max_size=60))
def test_session_survives_many_more_frames(
    frames: list[bytes], kind: type[Sessions | PlainSessions]
) -> None:
    fed([GREETING, *frames], kind)


async def test_uncorrupted_conversation_is_answered_without_error(victim: Victim) -> None:
    async with victim.unharmed():
        peer = await victim.connect()
        await peer.flood(GREETING + b"".join(GOOD))
        await peer.until(lambda peer: {1, 5, 7} <= set(peer.trailers))
        assert peer.goaway is None
        assert {code for _, code in peer.resets} <= {0}
