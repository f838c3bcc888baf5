"""The rules of RFC 9113 that a client can break, and the expected reaction to each."""

from dataclasses import dataclass

from hyperframe.frame import PingFrame

from tests.system.attacks.peer import (
    CALL,
    PREFACE,
    Fields,
    block,
    data,
    headers,
    raw,
    reset,
    settings,
    window_update,
)

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x4, 0x8, 0x20
WHOLE = END_STREAM | END_HEADERS

PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED = 1, 3, 5
FRAME_SIZE_ERROR, COMPRESSION_ERROR, CALM = 6, 9, 11


@dataclass(frozen=True)
class Rule:
    """section: of RFC 9113, or RFC 7541. sent: after the greeting, and after `before` was seen.
    goaway: the code that ends the connection; reset: the code that ends stream 1; without either,
    it is tolerated."""

    section: str
    broken: str
    sent: bytes
    goaway: int | None = None
    reset: int | None = None
    before: bytes = b""

    def __str__(self) -> str:
        return f"{self.section}-{self.broken}"


def _call(*fields: tuple[str, str], **instead: str) -> Fields:
    """The good head with fields replaced or added; "" leaves one out."""
    named = {name.replace("_", "-"): value for name, value in instead.items()}
    kept = [(name, named.pop(name.lstrip(":"), value)) for name, value in CALL]
    return [pair for pair in kept if pair[1]] + list(named.items()) + list(fields)


def _malformed(section: str, broken: str, fields: Fields) -> Rule:
    return Rule(section, broken, headers(1, fields), reset=PROTOCOL_ERROR)


OPEN = headers(1)
LAST = headers(1, flags=("END_HEADERS", "END_STREAM"))
# A call that is over on both sides: its request has ended, and is answered 415 at once.
OVER = headers(1, _call(content_type="x"), flags=("END_HEADERS", "END_STREAM"))
LONG = bytes(16_384)
MOST = 2**31 - 1

PREFACES = [
    Rule("3.4", "not a preface", b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", PROTOCOL_ERROR),
    Rule("3.4", "nearly a preface", PREFACE[:-1] + b"!", PROTOCOL_ERROR),
    Rule("3.4", "PING before SETTINGS", PREFACE + PingFrame(0).serialize(), PROTOCOL_ERROR),
    Rule("3.4", "HEADERS before SETTINGS", PREFACE + OPEN, PROTOCOL_ERROR),
    Rule("3.4", "an acknowledgement before SETTINGS", PREFACE + raw(SETTINGS, 1), PROTOCOL_ERROR),
    Rule("3.4", "TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", PROTOCOL_ERROR),
]

FRAMES = [
    Rule("4.1", "an unknown type", raw(0xAB, 0xFF, 0, b"what?")),
    Rule("4.1", "an unknown type on an idle stream", raw(0xAB, 0xFF, 77, b"what?")),
    Rule("4.1", "unknown flags", raw(PING, 0xFE, 0, bytes(8))),
    Rule("4.1", "the reserved bit", raw(PING, 0, 2**31, bytes(8))),
    Rule("4.2", "DATA too long", OPEN + raw(DATA, 0, 1, bytes(16_385)), FRAME_SIZE_ERROR),
    Rule("4.2", "HEADERS too long", raw(HEADERS, 4, 1, bytes(16_385)), FRAME_SIZE_ERROR),
    Rule("4.2", "unknown and too long", raw(0xAB, 0, 0, bytes(2**20)), FRAME_SIZE_ERROR),
    Rule("4.3", "a block that is cut", raw(HEADERS, 4, 1, b"\x00\x7f"), COMPRESSION_ERROR),
    Rule("4.3", "an index of nothing", raw(HEADERS, 4, 1, b"\x80"), COMPRESSION_ERROR),
    Rule("4.3", "an index too high", raw(HEADERS, 4, 1, b"\xff" * 9 + b"\x0f"), COMPRESSION_ERROR),
    Rule("4.3", "an endless integer", raw(HEADERS, 4, 1, b"\xff" * 16_000), COMPRESSION_ERROR),
    Rule("7541 5.2", "bad Huffman", raw(HEADERS, 4, 1, b"\x00\x84\xff\xff\xff\xff\x01a"), 9),
    Rule("7541 2.3.3", "a field of no table", raw(HEADERS, 4, 1, b"\xbe"), COMPRESSION_ERROR),
    Rule("7541 6.3", "a table above 0", raw(HEADERS, 4, 1, b"\x3f\x00"), COMPRESSION_ERROR),
    Rule("7541 6.3", "a table too large", raw(HEADERS, 4, 1, b"\x3f\xe2\x1f"), COMPRESSION_ERROR),
    Rule("7541 4.2", "many sizes", raw(HEADERS, 4, 1, b"\x20" * 16_000), COMPRESSION_ERROR),
    Rule("7541 4.2", "a size in the middle", raw(HEADERS, 4, 1, b"\x20\x82\x20"), 9),
]

STREAMS = [
    Rule("5.1", "DATA on an idle stream", data(3), PROTOCOL_ERROR),
    Rule("5.1", "RST_STREAM on an idle stream", reset(3), PROTOCOL_ERROR),
    Rule("5.1", "WINDOW_UPDATE on an idle stream", window_update(3, 1), PROTOCOL_ERROR),
    Rule("5.1", "CONTINUATION alone", OPEN + raw(CONTINUATION, 4, 1, b""), PROTOCOL_ERROR),
    Rule("5.1", "DATA after the end", OPEN + data(1, last=True) + data(1), reset=STREAM_CLOSED),
    Rule("5.1", "HEADERS after the end", headers(1), STREAM_CLOSED, before=OVER),
    Rule("5.1", "DATA when closed", data(1), reset=STREAM_CLOSED, before=OVER),
    Rule("5.1", "WINDOW_UPDATE when closed", window_update(1, 9), before=OVER),
    Rule("6.9", "WINDOW_UPDATE of 0 when closed", window_update(1, 0), reset=1, before=OVER),
    Rule("6.1", "too much padding when closed", raw(DATA, 8, 1, b"\x09"), 1, before=OVER),
    Rule("5.1", "RST_STREAM when closed", reset(1), before=OVER),
    Rule("5.1", "PRIORITY when closed", raw(PRIORITY, 0, 1, bytes(5)), before=OVER),
    Rule("5.1", "DATA after RST_STREAM", OPEN + reset(1) + data(1), reset=STREAM_CLOSED),
    Rule("5.1.1", "an even stream", headers(2), PROTOCOL_ERROR),
    Rule("5.1.1", "a lower stream", headers(5) + OPEN, STREAM_CLOSED),
    Rule("5.1.1", "the same stream", LAST + LAST, reset=STREAM_CLOSED),
    Rule("5.3.1", "a stream that depends on itself", raw(PRIORITY, 0, 1, b"\0\0\0\x01\xff")),
]

DATA_FRAMES = [
    Rule("6.1", "DATA on no stream", raw(DATA, 0, 0, b"a"), PROTOCOL_ERROR),
    Rule("6.1", "as much padding", OPEN + raw(DATA, PADDED, 1, b"\x06hello"), PROTOCOL_ERROR),
    Rule("6.1", "more padding", OPEN + raw(DATA, PADDED, 1, b"\xffhello"), PROTOCOL_ERROR),
    Rule("6.1", "no length of padding", OPEN + raw(DATA, PADDED, 1), FRAME_SIZE_ERROR),
    Rule("6.1", "padding and nothing else", OPEN + raw(DATA, PADDED, 1, b"\x05" + bytes(5))),
]

HEADS = [
    Rule("6.2", "HEADERS on no stream", raw(HEADERS, 4, 0, block()), PROTOCOL_ERROR),
    Rule("6.2", "too much padding", raw(HEADERS, 12, 1, b"\xff" + block()), PROTOCOL_ERROR),
    Rule("6.2", "a priority that is cut", raw(HEADERS, 0x24, 1, b"abc"), FRAME_SIZE_ERROR),
    Rule("6.2", "another stream within", raw(HEADERS, 0, 1, block()) + headers(3), PROTOCOL_ERROR),
    Rule("6.2", "PING within", raw(HEADERS, 0, 1) + raw(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    Rule("5.5", "an unknown frame within", raw(HEADERS, 0, 1) + raw(0xAB), PROTOCOL_ERROR),
    Rule("6.10", "CONTINUATION of another", raw(HEADERS, 0, 1) + raw(9, 4, 3), PROTOCOL_ERROR),
    Rule("6.10", "CONTINUATION on no stream", raw(CONTINUATION, 4, 0), PROTOCOL_ERROR),
    Rule("6.10", "endless CONTINUATION", raw(HEADERS, 0, 1) + raw(9, 0, 1) * 99, CALM),
    Rule("6.10", "a long block", raw(HEADERS, 0, 1, LONG) + raw(9, 0, 1, LONG) * 2, CALM),
    Rule("6.5.2", "a long list", raw(HEADERS, 4, 1, b"\x20" + b"\x82" * 1200), CALM),
]

CONTROL = [
    Rule("6.3", "PRIORITY on no stream", raw(PRIORITY, 0, 0, bytes(5)), PROTOCOL_ERROR),
    Rule("6.3", "short PRIORITY", OPEN + raw(PRIORITY, 0, 1, b"abcd"), reset=FRAME_SIZE_ERROR),
    Rule("6.4", "RST_STREAM on no stream", raw(RST, 0, 0, bytes(4)), PROTOCOL_ERROR),
    Rule("6.4", "a short RST_STREAM", OPEN + raw(RST, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
    Rule("6.5", "an acknowledgement of more", raw(SETTINGS, 1, 0, bytes(6)), FRAME_SIZE_ERROR),
    Rule("6.5", "SETTINGS on a stream", raw(SETTINGS, 0, 1), PROTOCOL_ERROR),
    Rule("6.5", "SETTINGS that are cut", raw(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
    Rule("6.5.2", "ENABLE_PUSH 2", settings(ENABLE_PUSH=2), PROTOCOL_ERROR),
    Rule("6.5.2", "a large window", settings(INITIAL_WINDOW_SIZE=2**31), FLOW_CONTROL_ERROR),
    Rule("6.5.2", "a small frame", settings(MAX_FRAME_SIZE=16_383), PROTOCOL_ERROR),
    Rule("6.5.2", "a large frame", settings(MAX_FRAME_SIZE=2**24), PROTOCOL_ERROR),
    Rule("6.5.2", "an unknown setting", raw(SETTINGS, 0, 0, b"\xff\xff\xff\xff\xff\xff")),
    Rule("6.6", "PUSH_PROMISE", OPEN + raw(PUSH, 4, 1, b"\0\0\0\x02" + block()), PROTOCOL_ERROR),
    Rule("6.7", "PING on a stream", raw(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
    Rule("6.7", "a long PING", raw(PING, 0, 0, bytes(9)), FRAME_SIZE_ERROR),
    Rule("6.8", "GOAWAY on a stream", raw(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    Rule("6.8", "a short GOAWAY", raw(GOAWAY, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
]

WINDOWS = [
    Rule("6.9", "an update of nothing", raw(UPDATE, 0, 0, bytes(4)), PROTOCOL_ERROR),
    Rule("6.9", "the same, of a stream", OPEN + raw(UPDATE, 0, 1, bytes(4)), reset=PROTOCOL_ERROR),
    Rule("6.9", "a short update", raw(UPDATE, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
    Rule("6.9.1", "a window too large", window_update(0, MOST), FLOW_CONTROL_ERROR),
    Rule("6.9.1", "the same, of a stream", OPEN + window_update(1, MOST), reset=FLOW_CONTROL_ERROR),
    Rule(
        "6.9.2",
        "a window that settings make too large",
        OPEN + window_update(1, MOST - 65_535) + settings(INITIAL_WINDOW_SIZE=65_536),
        FLOW_CONTROL_ERROR,
    ),
    Rule("6.9.2", "a window below 0", OPEN + settings(INITIAL_WINDOW_SIZE=0)),
]

MALFORMED = [
    _malformed("8.1.1", "a content-length too high", _call(content_length="x")),
    Rule(
        "8.1.1",
        "less than content-length",
        headers(1, _call(content_length="9")) + data(1, b"\0\0\0", last=True),
        reset=PROTOCOL_ERROR,
    ),
    Rule(
        "8.1.1",
        "no body but a content-length",
        headers(1, _call(content_length="9"), flags=("END_HEADERS", "END_STREAM")),
        reset=PROTOCOL_ERROR,
    ),
    Rule("8.1", "trailers that do not end", OPEN + headers(1, [("a", "b")]), reset=PROTOCOL_ERROR),
    Rule("8.1", "a second head", OPEN + LAST, reset=PROTOCOL_ERROR),
    _malformed("8.2.1", "an upper-case name", [*CALL, ("X-Up", "1")]),
    _malformed("8.2.1", "a blank in a name", [*CALL, ("a b", "1")]),
    _malformed("8.2.1", "a name that is not ASCII", [*CALL, ("\u00e4", "1")]),
    _malformed("8.2.1", "an empty name", [*CALL, ("", "1")]),
    _malformed("8.2.1", "a line end in a value", [*CALL, ("a", "1\r\nb: 2")]),
    _malformed("8.2.1", "a NUL in a value", [*CALL, ("a", "1\0")]),
    _malformed("8.2.1", "a blank before a value", [*CALL, ("a", " 1")]),
    _malformed("8.2.2", "connection", [*CALL, ("connection", "close")]),
    _malformed("8.2.2", "transfer-encoding", [*CALL, ("transfer-encoding", "chunked")]),
    _malformed("8.2.2", "upgrade", [*CALL, ("upgrade", "h2c")]),
    _malformed("8.2.2", "te", _call(te="gzip")),
    _malformed("8.3", "an unknown pseudo-header", [(":what", "1"), *CALL]),
    _malformed("8.3", "a pseudo-header of responses", [(":status", "200"), *CALL]),
    _malformed("8.3", "a late pseudo-header", [*CALL[-2:], *CALL[:-2]]),
    _malformed("8.3.1", "no method", _call(method="")),
    _malformed("8.3.1", "no scheme", _call(scheme="")),
    _malformed("8.3.1", "no path", _call(path="")),
    _malformed("8.3.1", "an empty path", [(":method", "POST"), (":scheme", "h"), (":path", "")]),
    _malformed("8.3.1", "two methods", [(":method", "POST"), *CALL]),
    _malformed("8.5", "CONNECT", [(":method", "CONNECT"), (":authority", "a")]),
]

RULES = [*FRAMES, *STREAMS, *DATA_FRAMES, *HEADS, *CONTROL, *WINDOWS, *MALFORMED]
