"""Limits of what one peer may cost, each with its reason.

docs/internals/lean-server.md lists them.
"""

from dataclasses import dataclass
from typing import Protocol, Self

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one connection; counts "a tick" are reset by each `Connection.tick`.

    max_streams: one for every request in flight; Envoy opens another connection beyond it.
    max_header_block_bytes: encoded, over HEADERS and its CONTINUATION frames.
    max_header_list_bytes: decoded, plus 32 bytes for each field (RFC 9113 6.5.2). gRPC
        metadata of a proxy is below 1 KiB.
    max_continuations: frames after one HEADERS; a limit of bytes would allow endless empty ones.
    stream_window_bytes: how much a peer may send on a stream before the server confirms its use;
        most requests fit, and need no WINDOW_UPDATE.
    connection_window_bytes: the same for all streams together.
    pings_a_tick, settings_a_tick: each causes an answer, and nothing else.
    idle_frames_a_tick: frames without progress: WINDOW_UPDATE, PRIORITY, unknown types, empty
        DATA, frames on closed streams. Each new stream allows `idle_frames_a_stream` more.
    rapid_resets_a_tick: streams that a peer resets before sending a byte on them
        (CVE-2023-44487); resets of used streams come from clients that disconnected.
    faults_a_tick: stream errors that are answered before the whole connection is closed.
    preface_ticks: how long the client's preface and SETTINGS may take to arrive.
    first_ticks: how long a call may be without its first message, which proxies send with its head.
    stall_ticks: how long a peer may leave an answer unread, or a message unfinished.
    """

    max_streams: int = 16_384
    max_header_block_bytes: int = 16 * KIB
    max_header_list_bytes: int = 32 * KIB
    max_continuations: int = 16
    stream_window_bytes: int = 1 * MIB
    connection_window_bytes: int = 16 * MIB
    pings_a_tick: int = 1_000
    settings_a_tick: int = 100
    idle_frames_a_tick: int = 10_000
    idle_frames_a_stream: int = 20
    rapid_resets_a_tick: int = 1_000
    faults_a_tick: int = 1_000
    preface_ticks: int = 2
    first_ticks: int = 1
    stall_ticks: int = 6


class SharedBudget(Protocol):
    """What `Budget` is, compiled or not."""

    @property
    def max_bytes(self) -> int:
        """The most bytes."""

    @property
    def used_bytes(self) -> int:
        """The reserved bytes."""

    def take(self, size: int, /) -> bool:
        """Reserves bytes; returns False, and reserves none, if there is no room for them."""

    def give_back(self, size: int, /) -> None:
        """Frees bytes that were reserved."""

    def share(self) -> Self:
        """Returns the share of one peer, which has nothing yet."""


# A peer may hold so many times what it leaves to others.
PARTS = 3


class Budget:
    """A limit of bytes for all together: unfinished messages, and answers that peers do not read.

    A share of it is what one peer takes: at most `PARTS` times what is then left to the others. So
    a lone one may take three quarters, each of two that take all they can get three sevenths, and
    nobody the last byte.

    whole: of which this is a share; None if it is none.
    """

    def __init__(self, max_bytes: int, whole: "Budget | None" = None) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._whole = whole

    def share(self) -> "Budget":
        """Returns the share of one peer, which has nothing yet."""
        return Budget(self.max_bytes, self)

    def take(self, size: int) -> bool:
        """Reserves bytes; returns False, and reserves none, if there is no room for them."""
        whole = self._whole or self
        left = whole.max_bytes - whole.used_bytes - size
        if left < 0:
            return False
        if self._whole is not None:
            if self.used_bytes + size > PARTS * left:
                return False
            self.used_bytes += size
        whole.used_bytes += size
        return True

    def give_back(self, size: int) -> None:
        """Frees bytes that were reserved."""
        self.used_bytes -= size
        if self._whole is not None:
            self._whole.used_bytes -= size
