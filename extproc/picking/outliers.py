"""Workers that answer request after request with failures: left out for a while.

Who refuses at once has nothing in flight and nothing queued, so to a balancer it looks idle, and
draws what the others could serve. Envoy's own outlier detection does not see to it: the endpoint
that is named to it is used whether it is ejected or not.
"""

from collections.abc import Collection
from dataclasses import dataclass

# Failures in a row, with no other answer between; as many as Envoy's outlier detection asks for.
FAILURES_UNTIL_LEFT_OUT = 5

# How long it is left out the first time; twice as long whenever it fails again right afterwards.
LEFT_OUT_SECONDS = 1.0
MAX_LEFT_OUT_SECONDS = 30.0

# From the last failure on: then it was long ago, and counts for nothing.
FORGET_SECONDS = 90.0

# As long as nothing fails, one request in so many has its response's status shown to us.
REQUESTS_A_LOOK = 8

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

    def remove(self, endpoint: str) -> None:
        """A worker is gone, and all that is known of it."""
        self._records.pop(endpoint, None)


def _is_over(record: _Record, now: float) -> bool:
    return now - record.last_at > FORGET_SECONDS
