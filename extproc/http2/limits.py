"""What one peer may cost: each limit with its reason. docs/lean-server.md lists them."""

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one connection; counts "a tick" are reset by each `Connection.tick`.

    max_streams: one for every request in flight; Envoy opens another connection beyond it.
    max_header_block_bytes: encoded, over HEADERS and its CONTINUATION frames.
    max_header_list_bytes: decoded, each field with 32 bytes on top (RFC 9113 6.5.2). gRPC
        metadata of a proxy is below 1 KiB.
    max_continuations: frames after one HEADERS; bytes alone would let empty ones go on for ever.
    stream_window_bytes: what a peer may send on a stream before we say that it was used; most
        requests fit, and so cost no WINDOW_UPDATE.
    connection_window_bytes: the same for all streams together.
    pings_a_tick, settings_a_tick: each is answered, and that is all they do.
    idle_frames_a_tick: frames that move nothing: WINDOW_UPDATE, PRIORITY, unknown types, empty
        DATA, frames on closed streams. A stream that is opened allows `idle_frames_a_stream` more.
    rapid_resets_a_tick: streams that a peer resets before it sent a byte on them
        (CVE-2023-44487); resets of used streams are clients that went away.
    faults_a_tick: stream errors that we answer before the whole connection is given up.
    preface_ticks: until the client's preface and SETTINGS must be there.
    stall_ticks: how long a stream may keep what we have to send, or a message it began, waiting.
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
    stall_ticks: int = 6


class Budget:
    """Bytes that all connections of a server together may keep: unfinished messages, and answers
    that their peers do not take."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0

    def take(self, size: int) -> bool:
        """Reserves bytes; returns False, and reserves none, if there is no room for them."""
        if self.held + size > self.max_bytes:
            return False
        self.held += size
        return True

    def give_back(self, size: int) -> None:
        """Frees bytes that were reserved."""
        self.held -= size
