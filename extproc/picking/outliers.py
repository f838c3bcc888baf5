"""Workers that fail: that answer request after request with failures, or do not answer any more.

Who refuses at once has nothing in flight and nothing queued, so to a balancer it looks idle, and
draws what the others could serve. Envoy's own outlier detection does not see to it: the endpoint
that is named to it is used whether it is ejected or not. The same holds for who is dead.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

# Failures in a row, with no other answer between; as many as Envoy's outlier detection asks for.
FAILURES_UNTIL_LEFT_OUT = 5

# How long it is left out the first time; twice as long whenever it fails again right afterwards.
LEFT_OUT_SECONDS = 1.0
MAX_LEFT_OUT_SECONDS = 30.0

# From the last failure on: then it was long ago, and counts for nothing.
FORGET_SECONDS = 90.0

# As long as nothing fails, one request in so many has its response's status shown to us.
REQUESTS_A_LOOK = 8

# With requests under way, a worker that gives no sign of life for so long is asked whether it is
# well; and so long after an answer it may be asked again, if the reason is still there.
SILENT_SECONDS = 0.5
ASKED_AGAIN_SECONDS = 0.75

# So soon after a question that it did not answer.
RETRY_SECONDS = 0.25

# Failures in a row that leave it out, where one alone proves nothing.
FAILURES_UNTIL_DEAD = 2

_TOO_MANY_REQUESTS = 429
_FIRST_SERVER_ERROR = 500


@dataclass(slots=True)
class _Record:
    failures: int = 0
    last_at: float = 0.0
    left_out: int = 0
    until: float = 0.0


class Outliers:
    """The endpoints that failed lately. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._requests = 0

    def wants_status(self) -> bool:
        """Whether the next request's response is worth a look: one in a few, or all in doubt."""
        self._requests += 1
        return bool(self._records) or self._requests % REQUESTS_A_LOOK == 0

    def answered(self, endpoint: str, status: int, now: float) -> float | None:
        """Takes a response's status: 429 and 5xx are failures, any other comes of a sound worker.

        For how many seconds its endpoint is left out from now on; 0 if it was, and is no more; None
        if nothing changed.
        """
        if status < _FIRST_SERVER_ERROR and status != _TOO_MANY_REQUESTS:
            known = self._records.pop(endpoint, None)
            return 0.0 if known is not None and known.left_out else None
        record = self._records.setdefault(endpoint, _Record())
        record.failures += 1
        record.last_at = now
        if record.failures < FAILURES_UNTIL_LEFT_OUT or now < record.until:
            return None
        seconds = min(MAX_LEFT_OUT_SECONDS, LEFT_OUT_SECONDS * 2.0**record.left_out)
        record.left_out += 1
        record.until = now + seconds
        return seconds

    def left_out(self, now: float) -> Collection[str]:
        """The endpoints that are left out now."""
        if not self._records:
            return ()
        for endpoint in [one for one, record in self._records.items() if _is_over(record, now)]:
            del self._records[endpoint]
        return [one for one in self._records if self.is_left_out(one, now)]

    def is_left_out(self, endpoint: str, now: float) -> bool:
        """Whether this one is."""
        record = self._records.get(endpoint)
        return record is not None and now < record.until

    def is_doubted(self, endpoint: str) -> bool:
        """Whether its last answer that was looked at was a failure."""
        return endpoint in self._records

    def remove(self, endpoint: str) -> None:
        """A worker is gone, and all that is known of it."""
        self._records.pop(endpoint, None)


def _is_over(record: _Record, now: float) -> bool:
    return now - record.last_at > FORGET_SECONDS


class Pulse(NamedTuple):
    """What shows whether a worker lives.

    is_cut: its feed has no connection. batches: that came of its feed so far. in_flight: requests
    under way. is_doubted: its answers fail, or others answer in its place.
    """

    is_cut: bool = False
    batches: int = 0
    in_flight: int = 0
    is_doubted: bool = False


@dataclass(slots=True)
class _Vital:
    alive_at: float
    batches: int
    due_at: float = 0.0
    failures: int = 0
    is_asked: bool = False
    is_dead: bool = False


class Vitals:
    """Which endpoints are to be asked whether they live, and which do not.

    A worker is asked only for a reason, so a sound fleet is asked nothing. Times are seconds of one
    monotonic clock.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Vital] = {}

    def __len__(self) -> int:
        """Endpoints of which something is known."""
        return len(self._known)

    def is_due(self, endpoint: str, pulse: Pulse, now: float) -> bool:
        """Whether it is to be asked now; then `alive` or `failed` is to follow."""
        known = self._known.get(endpoint)
        if known is None:
            known = self._known[endpoint] = _Vital(now, pulse.batches)
        if not pulse.in_flight or pulse.batches != known.batches:
            known.alive_at, known.batches = now, pulse.batches
        is_silent = now - known.alive_at > SILENT_SECONDS
        has_reason = known.is_dead or pulse.is_cut or pulse.is_doubted or is_silent
        if known.is_asked or now < known.due_at or not has_reason:
            return False
        known.is_asked = True
        return True

    def alive(self, endpoint: str, now: float) -> bool:
        """It answered; whether it was taken for dead."""
        known = self._known.get(endpoint)
        if known is None:  # it is gone meanwhile
            return False
        was_dead, known.is_dead = known.is_dead, False
        known.is_asked, known.failures = False, 0
        known.alive_at, known.due_at = now, now + ASKED_AGAIN_SECONDS
        return was_dead

    def failed(self, endpoint: str, now: float, *, is_certain: bool) -> bool:
        """It did not answer as it should; whether it is taken for dead from now on.

        is_certain: this one failure proves it.
        """
        known = self._known.get(endpoint)
        if known is None:
            return False
        known.is_asked, known.due_at = False, now + RETRY_SECONDS
        known.failures += 1
        if known.is_dead or not (is_certain or known.failures >= FAILURES_UNTIL_DEAD):
            return False
        known.is_dead = True
        return True

    def keep(self, endpoints: Collection[str]) -> None:
        """Forgets all others."""
        for endpoint in self._known.keys() - set(endpoints):
            del self._known[endpoint]
