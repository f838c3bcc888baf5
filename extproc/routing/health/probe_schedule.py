"""When an endpoint is due for a health probe: only if there is a reason."""

from dataclasses import dataclass
from typing import NamedTuple

# A worker with requests in flight that shows no sign of life for this long gets a health probe;
# this long after an answer it may be probed again, if the reason persists.
SILENT_SECONDS = 0.5
ASKED_AGAIN_SECONDS = 0.75

# This soon after a failed probe it is probed again.
RETRY_SECONDS = 0.25


class SignsOfLife(NamedTuple):
    """The signs of whether a worker is alive.

    is_cut: whether its feed has no connection. batches: how many its feed has received so far.
    in_flight: its requests in flight. is_doubted: whether its last probe took it for dead, its
    answers fail, it may sleep, or its health is in doubt, for example because others answer in its
    place.
    """

    is_cut: bool = False
    batches: int = 0
    in_flight: int = 0
    is_doubted: bool = False


@dataclass(slots=True)
class ProbeSchedule:
    """When to probe one endpoint.

    It is probed only for a reason: its feed has no connection, it is doubted, or it has requests
    but gave no sign of life for `SILENT_SECONDS`. Without a feed, a slow answer is such a silence.
    Times are seconds of one monotonic clock.
    """

    alive_at: float | None = None
    batches: int = 0
    due_at: float = 0.0
    is_asked: bool = False

    def is_due(self, signs: SignsOfLife, now: float) -> bool:
        """Returns whether to probe it now; if so, `end` must follow, whatever comes of it."""
        if self.alive_at is None or not signs.in_flight or signs.batches != self.batches:
            self.alive_at, self.batches = now, signs.batches
        is_silent = now - self.alive_at > SILENT_SECONDS
        has_reason = signs.is_cut or signs.is_doubted or is_silent
        if self.is_asked or now < self.due_at or not has_reason:
            return False
        self.is_asked = True
        return True

    def end(self, now: float) -> None:
        """Notes that a probe is over; without an answer, it is due again after a while."""
        self.is_asked, self.due_at = False, now + RETRY_SECONDS

    def note_life(self, now: float) -> None:
        """Notes that it answered its probe."""
        self.alive_at, self.due_at = now, now + ASKED_AGAIN_SECONDS
