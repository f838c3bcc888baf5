"""Counts what a peer may do only so often, until the next tick."""

from extproc.errors import Http2Error
from extproc.http2.frames import ErrorCode
from extproc.http2.limits import Limits


class Floods:
    """Of one connection.

    Each method counts one and raises Http2Error (ENHANCE_YOUR_CALM) when it is one too many.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.tick()

    def tick(self) -> None:
        """Counting starts anew."""
        limits = self._limits
        self._pings = limits.pings_a_tick
        self._settings = limits.settings_a_tick
        self._idle_frames = limits.idle_frames_a_tick
        self._rapid_resets = limits.rapid_resets_a_tick
        self._faults = limits.faults_a_tick

    def stream_opened(self) -> None:
        """A stream allows for a few idle frames of its own."""
        self._idle_frames += self._limits.idle_frames_a_stream

    def ping(self) -> None:
        """PING, or its acknowledgement."""
        self._pings -= 1
        _check(self._pings, "PING")

    def settings(self) -> None:
        """SETTINGS, or its acknowledgement."""
        self._settings -= 1
        _check(self._settings, "SETTINGS")

    def idle_frame(self) -> None:
        """A frame that moves nothing."""
        self._idle_frames -= 1
        _check(self._idle_frames, "frames that move nothing")

    def rapid_reset(self) -> None:
        """RST_STREAM on a stream on which nothing was sent."""
        self._rapid_resets -= 1
        _check(self._rapid_resets, "streams reset at once")

    def fault(self) -> None:
        """An error of one stream."""
        self._faults -= 1
        _check(self._faults, "stream errors")


def _check(left: int, what: str) -> None:
    if left < 0:
        raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}")
