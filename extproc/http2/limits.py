"""Limits of what one peer may cost, each with its reason.

docs/internals/lean-server.md lists them.
"""

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one connection; counts "a tick" are reset by each `Session.tick`.

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
