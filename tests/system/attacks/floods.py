"""Bytes to send after the greeting that are cheap for a client and costly for a server."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hpack import Encoder
from hyperframe.frame import PingFrame

from tests.system.attacks.peer import data, headers, message, raw, reset, settings, window_update
from tests.system.attacks.rules import CALM, CONTINUATION, HEADERS, PRIORITY, PROTOCOL_ERROR
from tests.system.attacks.victim import BODY, HEAD

MANY = 20_000


@dataclass(frozen=True)
class Flood:
    """make: builds what is sent, only when it is needed: some take a second.

    goaway: the code with which the server ends it, None if it tolerates it.
    """

    name: str
    make: Callable[[], bytes] = field(repr=False)
    goaway: int | None = CALM

    def __str__(self) -> str:
        return self.name


def _streams(count: int, rest: bytes = b"", *, resets: bool = False) -> bytes:
    """This many calls, one after the other; rest: the payload of each call's DATA frame."""
    parts = []
    for number in range(1, 2 * count, 2):
        parts += [headers(number), data(number, rest) if rest else b""]
        parts.append(reset(number) if resets else b"")
    return b"".join(parts)


def _bomb() -> bytes:
    """A field of 4,000 bytes that enters the table, and a thousand fields that refer to it."""
    return raw(HEADERS, 4, 1, Encoder().encode([("x", "\0" * 3990)]) + b"\xbe" * 1000)


CALL = message(HEAD) + message(BODY)
SLOW_HEAD = b"\x20" + b"\x00\x01a\x00" * 200

FLOODS = [
    Flood("SETTINGS", lambda: settings(MAX_CONCURRENT_STREAMS=1) * MANY),
    Flood(
        "SETTINGS of many windows",
        lambda: raw(4, 0, 0, b"\0\x04\0\0\0\0\0\x04\0\0\0\x01" * 1300) * 200,
    ),
    Flood("acknowledgements of SETTINGS", lambda: raw(4, 1) * MANY),
    Flood("PING", lambda: PingFrame(0, b"12345678").serialize() * MANY),
    Flood("PING on a wrong stream", lambda: raw(6, 0, 1, bytes(8)) * MANY, PROTOCOL_ERROR),
    Flood("rapid reset", lambda: _streams(MANY, resets=True)),
    Flood("rapid reset of calls that began", lambda: _streams(MANY // 2, CALL, resets=True), None),
    Flood(
        "CONTINUATION without an end", lambda: raw(HEADERS, 0, 1) + raw(CONTINUATION, 0, 1) * MANY
    ),
    Flood(
        "CONTINUATION with much in it",
        lambda: raw(HEADERS, 0, 1) + raw(9, 0, 1, bytes(16_384)) * 999,
    ),
    Flood("a header bomb", _bomb),
    Flood(
        "heads that are slow to read",
        lambda: b"".join(raw(1, 4, n, SLOW_HEAD) for n in range(1, 4001, 2)),
    ),
    Flood("WINDOW_UPDATE", lambda: headers(1) + window_update(1, 1) * MANY),
    Flood("WINDOW_UPDATE of the connection", lambda: window_update(0, 1) * MANY),
    Flood("empty DATA", lambda: headers(1) + data(1) * MANY),
    Flood("padded empty DATA", lambda: headers(1) + raw(0, 8, 1, b"\xff" + bytes(255)) * MANY),
    Flood(
        "DATA byte by byte",
        lambda: headers(1) + b"".join(data(1, bytes([b])) for b in CALL * 40),
        None,
    ),
    Flood("PRIORITY", lambda: raw(PRIORITY, 0, 1, bytes(5)) * MANY),
    Flood("unknown frames", lambda: raw(0xAB, 0, 0, b"?") * MANY),
    Flood("DATA on a closed stream", lambda: headers(1) + reset(1) + data(1, b"?") * MANY),
    Flood("RST_STREAM again and again", lambda: headers(1) + reset(1) * MANY),
    Flood(
        "malformed requests", lambda: b"".join(headers(n, [("a", "b")]) for n in range(1, MANY, 2))
    ),
    Flood(
        "calls that are refused",
        lambda: b"".join(
            headers(
                n,
                [(":method", "GET"), (":path", "/"), (":scheme", "http")],
                flags=("END_HEADERS", "END_STREAM"),
            )
            for n in range(1, MANY, 2)
        ),
        None,
    ),
    Flood(
        "answers that nobody takes",
        lambda: settings(INITIAL_WINDOW_SIZE=0) + _streams(5000, CALL),
        None,
    ),
    Flood("calls that do not go on", lambda: _streams(5000, CALL[:20]), None),
]
