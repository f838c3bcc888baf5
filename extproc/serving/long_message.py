"""Decodes a long ext_proc message, most of which is a request's body, without holding up others.

The decoder would copy the body, and so would each access to it: tens of milliseconds for 28 MiB,
since fresh memory costs more than copying. So the body is found by its offsets and joined once, in
a thread, where joining many pieces leaves other threads their turns; only the rest is decoded.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

from extproc.http2.messages import MessageParts
from extproc.serving.proxy_decoder import ProxyDecoder
from extproc.serving.proxy_message import REQUEST_BODY, ProxyMessage

# The tags of ProcessingRequest.request_body and of HttpBody.body: both have a length.
_REQUEST_BODY = 0x22
_BODY = 0x0A

# Most bytes of a message besides its body.
_MAX_REST_BYTES = 65_536

_CONTINUES = 0x80
_LENGTH_BYTES = 5


async def joined(message: MessageParts, decoder: ProxyDecoder, thread: Executor) -> ProxyMessage:
    """Returns what a message in parts says, which a thread joins.

    Raises:
        DecodeError: it is malformed.
    """
    loop = asyncio.get_running_loop()
    parted = without_body(message.parts)
    if parted is not None:
        rest, pieces = parted
        read = decoder.decode(rest)
        read.size_bytes = len(message)
        if read.kind != REQUEST_BODY:  # another field follows, which replaces the body
            return read
        if not read.body:  # given twice, the last one counts
            read.body = await loop.run_in_executor(thread, b"".join, pieces)
            return read
    return decoder.decode(await loop.run_in_executor(thread, b"".join, message.parts))


def without_body(parts: Sequence[bytes]) -> tuple[bytes, list[bytes]] | None:
    """Returns a message without its request's body, and the pieces of that body.

    Returns None if the message does not begin with a request's body, or has much else in it.
    """
    body = _field(parts[0], 0, _REQUEST_BODY)
    content = _field(parts[0], body[0], _BODY) if body is not None else None
    if body is None or content is None:
        return None
    start, end = content
    size = sum(map(len, parts))
    if not (start <= len(parts[0]) and end <= body[1] <= size <= end + _MAX_REST_BYTES):
        return None
    tail, pieces = b"", [*parts]
    while len(tail) + len(pieces[-1]) <= size - end:
        tail = pieces.pop() + tail
    kept, last = len(pieces[-1]) - (size - end - len(tail)), pieces.pop()
    tail = last[kept:] + tail
    # what came in one piece is copied once, however long it is
    pieces = [pieces[0][start:], *pieces[1:], last[:kept]] if pieces else [last[start:kept]]
    return bytes((_REQUEST_BODY, *_length(body[1] - end))) + tail, pieces


def _field(data: bytes, at: int, tag: int) -> tuple[int, int] | None:
    """Returns where the content of a field that begins here starts and ends, None without it."""
    if data[at : at + 1] != bytes((tag,)):
        return None
    length = 0
    for place, byte in enumerate(data[at + 1 : at + 1 + _LENGTH_BYTES]):
        length |= (byte & ~_CONTINUES) << 7 * place
        if byte < _CONTINUES:
            start = at + 2 + place
            return start, start + length
    return None


def _length(length: int) -> tuple[int, ...]:
    if length < _CONTINUES:
        return (length,)
    return (length % _CONTINUES | _CONTINUES, *_length(length // _CONTINUES))
