"""Limits of what one peer may cost, each with its reason.

docs/internals/lean-server.md lists them.
"""

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one connection; counts "a tick" are reset by each `Session.tick`."""

    # One for every request in flight; Envoy opens another connection beyond it.
    max_streams: int = 16_384
    # Of encoded headers, over HEADERS and its CONTINUATION frames.
    max_header_block_bytes: int = 16 * KIB
    # Of decoded headers, plus 32 bytes for each field (RFC 9113 6.5.2). gRPC metadata of a proxy is
    # below 1 KiB.
    max_header_list_bytes: int = 32 * KIB
    # Frames after one HEADERS; a limit of bytes would allow endless empty ones.
    max_continuations: int = 16
    # How much a peer may send on a stream before the server confirms its use; most requests fit,
    # and need no WINDOW_UPDATE.
    stream_window_bytes: int = 1 * MIB
    # The same for all streams together.
    connection_window_bytes: int = 16 * MIB
    # PING frames: each causes an answer, and nothing else.
    pings_a_tick: int = 1_000
    # SETTINGS frames, likewise.
    settings_a_tick: int = 100
    # Frames without progress: WINDOW_UPDATE, PRIORITY, unknown types, empty DATA, frames on closed
    # streams.
    idle_frames_a_tick: int = 10_000
    # Each new stream allows so many more of them.
    idle_frames_a_stream: int = 20
    # Streams that a peer resets before sending a byte on them (CVE-2023-44487); resets of used
    # streams come from clients that disconnected.
    rapid_resets_a_tick: int = 1_000
    # Stream errors that are answered before the whole connection is closed.
    faults_a_tick: int = 1_000
    # How long the client's preface and SETTINGS may take to arrive.
    preface_ticks: int = 2
    # How long a call may be without its first message, which proxies send with its head.
    first_ticks: int = 1
    # How long a peer may leave an answer unread, or a message unfinished.
    stall_ticks: int = 6
