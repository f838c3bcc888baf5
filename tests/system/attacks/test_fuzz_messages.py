"""Invalid messages, in any order: each ends at most its own stream."""

import asyncio
import random
from collections.abc import Callable, Iterator

from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest
from tests.extproc.messages import body, head, response_head, trailers
from tests.system.attacks.peer import GREETING, Peer, data, headers, message, window_update
from tests.system.attacks.victim import BODY, HEAD, Victim

SEED = 20_260
LAST = trailers().SerializeToString()
PARTS = [HEAD, BODY, LAST, body(b"", end_of_stream=False).SerializeToString()]
PARTS += [head(mode=mode).SerializeToString() for mode in (None, 0, 1, 2, 3, 4, 5, 99)]
PARTS += [response_head(200).SerializeToString(), response_head("x" * 99).SerializeToString()]


def nested(depth: int) -> bytes:
    """Structures nested in metadata_context, encoded by hand: they are too deep to build."""
    inner = b""
    for _ in range(depth):
        value = b"\x2a" + _varint(len(inner)) + inner  # Value.struct_value
        entry = b"\x0a\x01k\x12" + _varint(len(value)) + value
        inner = b"\x0a" + _varint(len(entry)) + entry  # Struct.fields
    entry = b"\x0a\x01n\x12" + _varint(len(inner)) + inner
    context = b"\x0a" + _varint(len(entry)) + entry
    return b"\x42" + _varint(len(context)) + context


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def huge() -> Iterator[bytes]:
    """Large messages that are valid, or nearly so."""
    yield from (nested(depth) for depth in (1, 50, 99, 101, 1000, 5000))
    yield head("/" + "a" * 2**20).SerializeToString()
    yield head(headers={f"x-{n}": "y" for n in range(20_000)}).SerializeToString()
    yield head(method="\0" * 10_000).SerializeToString()
    yield head(headers={"content-length": "9" * 10_000}).SerializeToString()


BODIES = [
    b"[" * 100_000,
    b'{"model":' * 20_000,
    b'{"model": "m", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"model": "m", "prompt": [' + b"9" * 50_000 + b"]}",
    b'{"model": "m", "prompt": [-1, 1e400, 99999999999999999999]}',
    b'{"model": "m", "prompt": [' + b"1," * 200_000 + b"1]}",
    b'{"model": "m", "messages": [' + b"{}," * 50_000 + b"{}]}",
    b'{"model": "' + b"m" * 500_000 + b'"}',
    b'{"model": "m", "prompt": "\\ud800"}',
    b"\xff\xfe" * 1000,
    b"{" + b",".join(b'"k%d": 0' % n for n in range(50_000)) + b"}",
    b"",
]


def mutated(rng: random.Random, good: bytes) -> bytes:
    """The message with some bytes changed, removed or inserted."""
    changed = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        changed[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
    return bytes(changed)


def conversations(count: int) -> Iterator[bytes]:
    """What to send on each stream: noise, changed messages, or good ones in any order."""
    rng = random.Random(SEED)
    for _ in range(count):
        kind = rng.randrange(3)
        if kind == 0:
            sent = [rng.randbytes(rng.randint(0, 200)) for _ in range(rng.randint(1, 3))]
        elif kind == 1:
            sent = [HEAD, mutated(rng, rng.choice(PARTS)), BODY]
        else:
            sent = rng.choices(PARTS, k=rng.randint(1, 8))
        yield b"".join(message(one) for one in sent)


def is_over(stream: int) -> Callable[[Peer], bool]:
    """Whether a stream has ended."""
    return lambda peer: stream in peer.trailers or stream in dict(peer.resets)


async def test_invalid_message_ends_at_most_its_own_stream(victim: Victim) -> None:
    async with victim.unharmed(may_grow_bytes=100 * 2**20):
        peer = await victim.connect()
        parts = [GREETING, window_update(0, 2**24)]
        numbers = range(1, 1201, 2)
        for number, sent in zip(numbers, conversations(len(numbers)), strict=True):
            parts += [headers(number), data(number, sent, last=True)]
        peer.send(*parts)
        await peer.until(lambda peer: len({*peer.trailers, *dict(peer.resets)}) == len(numbers))
        assert peer.goaway is None


async def test_huge_messages_end_their_streams_or_are_answered(victim: Victim) -> None:
    async with victim.unharmed(may_grow_bytes=300 * 2**20):
        peer = await victim.connect()
        peer.send(GREETING, window_update(0, 2**24))
        calls = [message(one) for one in huge()]
        calls += [message(HEAD) + message(body(one).SerializeToString()) for one in BODIES]
        for number, sent in zip(range(1, 2 * len(calls), 2), calls, strict=True):
            pieces = [data(number, sent[at : at + 16_000]) for at in range(0, len(sent), 16_000)]
            peer.send(headers(number), *pieces, data(number, last=True))
            await peer.until(is_over(number))
        assert peer.goaway is None


def test_nested_message_is_parsed_at_a_permitted_depth() -> None:
    space = ProcessingRequest.FromString(nested(2)).metadata_context.filter_metadata["n"]
    assert space.fields["k"].struct_value.fields["k"].HasField("struct_value")


async def test_streams_of_random_bytes_on_many_connections_affect_no_other_peer(
    victim: Victim,
) -> None:
    rng = random.Random(SEED)
    async with victim.unharmed(may_grow_bytes=100 * 2**20):
        peers = [await victim.connect() for _ in range(20)]
        noise = [
            headers(1) + data(1, rng.randbytes(4000)) + data(1, rng.randbytes(9)) for _ in peers
        ]
        await asyncio.gather(
            *(peer.flood(GREETING + sent) for peer, sent in zip(peers, noise, strict=True))
        )
