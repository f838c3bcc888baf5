"""A client that follows no rules: it writes any bytes, and parses the answers.

Frames are built and read by `hyperframe` and header blocks by `hpack`, not by KVSteer's own code.
"""

import asyncio
import contextlib
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

from hpack import Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
OURS = b"hostile!"
WAIT_SECONDS = 60.0
CHOKED_SECONDS = 3.0
AT_ONCE = 200

Fields = Sequence[tuple[str, str]]
CALL: Fields = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PROCESS),
    (":authority", "router"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)


def raw(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Any frame, right or wrong."""
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def block(fields: Fields = CALL, *, size_updates: int = 1) -> bytes:
    """A header block without state: it reduces the table to size 0, and adds nothing to it."""
    return b"\x20" * size_updates + _encoded(tuple(fields))


@lru_cache(64)
def _encoded(fields: tuple[tuple[str, str], ...]) -> bytes:
    return Encoder().encode([(name, value, True) for name, value in fields])


def headers(
    stream: int, fields: Fields = CALL, *, flags: Sequence[str] = ("END_HEADERS",)
) -> bytes:
    """HEADERS."""
    return HeadersFrame(stream, block(fields), flags=flags).serialize()


def data(stream: int, payload: bytes = b"", *, last: bool = False) -> bytes:
    """DATA."""
    return DataFrame(stream, payload, flags=["END_STREAM"] if last else []).serialize()


def reset(stream: int, code: int = 8) -> bytes:
    """RST_STREAM, by default with CANCEL."""
    return RstStreamFrame(stream, error_code=code).serialize()


def settings(**values: int) -> bytes:
    """SETTINGS, by the names that hyperframe has for them."""
    known = {getattr(SettingsFrame, name): value for name, value in values.items()}
    return SettingsFrame(0, settings=known).serialize()


def window_update(stream: int, increment: int) -> bytes:
    """WINDOW_UPDATE."""
    return WindowUpdateFrame(stream, window_increment=increment).serialize()


def message(payload: bytes) -> bytes:
    """A gRPC message, with its prefix."""
    return struct.pack(">BI", 0, len(payload)) + payload


GREETING = PREFACE + settings() + SettingsFrame(0, flags=["ACK"]).serialize()


class Peer:
    """One connection, and the frames that came on it; is_over: the other side has closed it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._rest = b""
        self.frames: list[Frame] = []
        self.is_over = False

    def send(self, *frames: bytes) -> None:
        """Writes, if it still can."""
        if not self._writer.is_closing():
            self._writer.writelines(frames)

    async def flood(self, frames: bytes) -> "Peer":
        """Writes frames, and reads until all were seen, or the connection ends."""
        self.send(frames)
        return await self.seen()

    async def is_choked(self, part: Callable[[int], bytes], limit: int) -> bool:
        """Whether the other side stops reading before `limit` bytes; part: builds a stream's."""
        number = 1
        while limit > 0:
            sent = b"".join(part(n) for n in range(number, number + 2 * AT_ONCE, 2))
            self._writer.write(sent)
            number, limit = number + 2 * AT_ONCE, limit - len(sent)
            try:
                await asyncio.wait_for(self._writer.drain(), CHOKED_SECONDS)
            except (TimeoutError, ConnectionError):
                return True
        return False

    def half_close(self) -> None:
        """Ends our side of the connection."""
        with contextlib.suppress(OSError):  # the connection may be gone already
            self._writer.write_eof()

    def close(self) -> None:
        """Aborts the connection."""
        self._writer.transport.abort()

    async def until(self, is_enough: Callable[["Peer"], bool]) -> "Peer":
        """Reads until a condition holds, or the connection ends."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not self.is_over and not is_enough(self):
                await self._read()
        return self

    async def ended(self) -> "Peer":
        """Reads until the connection ends."""
        return await self.until(lambda _: False)

    async def seen(self) -> "Peer":
        """Reads until a PING is answered: what was sent before has been seen."""
        self.send(PingFrame(0, OURS).serialize())
        return await self.until(Peer.is_answered)

    def is_answered(self) -> bool:
        """Whether our PING was answered."""
        return any(isinstance(one, PingFrame) and one.opaque_data == OURS for one in self.frames)

    @property
    def goaway(self) -> int | None:
        """The code of the last GOAWAY."""
        codes = [one.error_code for one in self.frames if isinstance(one, GoAwayFrame)]
        return codes[-1] if codes else None

    @property
    def resets(self) -> list[tuple[int, int]]:
        """Stream and code of each RST_STREAM."""
        found = [one for one in self.frames if isinstance(one, RstStreamFrame)]
        return [(one.stream_id, one.error_code) for one in found]

    @property
    def trailers(self) -> dict[int, bytes]:
        """The last HEADERS of each stream that was answered completely."""
        found = [one for one in self.frames if isinstance(one, HeadersFrame)]
        return {one.stream_id: one.data for one in found if "END_STREAM" in one.flags}

    async def _read(self) -> None:
        try:
            more = await self._reader.read(65_536)
        except ConnectionError:
            more = b""
        self.is_over = not more
        self._rest += more
        while len(self._rest) >= 9:
            frame, length = Frame.parse_frame_header(memoryview(self._rest[:9]))
            if len(self._rest) < 9 + length:
                return
            frame.parse_body(memoryview(self._rest[9 : 9 + length]))
            self._rest = self._rest[9 + length :]
            self.frames.append(frame)
