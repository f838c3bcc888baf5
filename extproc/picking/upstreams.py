"""The records of upstreams: what each endpoint has to do, and what speaks against it.

A worker that refuses at once has nothing in flight and nothing queued, so to a balancer it looks
idle, and draws what the others could serve. Envoy's own outlier detection does not see to it: the
endpoint that is named to it is used whether it is ejected or not. The same holds for one that is
dead.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from extproc.picking.load import EndpointLoad

# From this status on, the worker did not compute the prompt, or not to its end.
FIRST_FAILURE = 400

# Failures in a row, with no other answer between; as many as Envoy's outlier detection asks for.
FAILURES_UNTIL_LEFT_OUT = 5

# How long it is left out the first time; twice as long whenever it fails again right afterwards.
LEFT_OUT_SECONDS = 1.0
MAX_LEFT_OUT_SECONDS = 30.0

# From the last failure on: then it was long ago, and counts for nothing.
FORGET_SECONDS = 90.0

# With requests under way, a worker that gives no sign of life for so long is asked whether it is
# well; and so long after an answer it may be asked again, if the reason is still there.
SILENT_SECONDS = 0.5
ASKED_AGAIN_SECONDS = 0.75

# So soon after a question that it did not answer.
RETRY_SECONDS = 0.25

# Failures in a row that leave it out, where one alone proves nothing.
FAILURES_UNTIL_DEAD = 2

_TOO_MANY_REQUESTS = 429
FIRST_SERVER_ERROR = 500


_NONE: Mapping[str, str] = {}

FAILING = "answers request after request with failures"


@dataclass(slots=True)
class Outlier:
    """The failures of one endpoint, in a row. Times are seconds of one monotonic clock."""

    failures: int = 0
    last_at: float = 0.0
    left_out: int = 0
    until: float = 0.0

    def answered(self, status: int, now: float) -> float | None:
        """Takes a response's status: 429 and 5xx are failures, any other comes of a sound worker.

        Returns for how many seconds the endpoint is ejected from now on; 0 if it was, and is no
        more; None if nothing changed.
        """
        if status < FIRST_SERVER_ERROR and status != _TOO_MANY_REQUESTS:
            was_left_out = self.left_out
            self.forget()
            return 0.0 if was_left_out else None
        self.failures += 1
        self.last_at = now
        if self.failures < FAILURES_UNTIL_LEFT_OUT or now < self.until:
            return None
        seconds = min(MAX_LEFT_OUT_SECONDS, LEFT_OUT_SECONDS * 2.0**self.left_out)
        self.left_out += 1
        self.until = now + seconds
        return seconds

    def forget(self) -> None:
        """Begins anew."""
        self.failures = self.left_out = 0
        self.last_at = self.until = 0.0

    def is_left_out(self, now: float) -> bool:
        """Whether it is ejected now."""
        return bool(self.failures) and now < self.until

    def is_over(self, now: float) -> bool:
        """Whether its last failure was too long ago to count."""
        return now - self.last_at > FORGET_SECONDS


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
class Vital:
    """Whether one endpoint is to be asked if it lives, and whether it does.

    It is asked only for a reason, so a sound fleet is asked nothing. Times are seconds of one
    monotonic clock.
    """

    alive_at: float | None = None
    batches: int = 0
    due_at: float = 0.0
    failures: int = 0
    is_asked: bool = False
    is_dead: bool = False

    def is_due(self, pulse: Pulse, now: float) -> bool:
        """Whether it is to be asked now; then `alive` or `failed` is to follow."""
        if self.alive_at is None or not pulse.in_flight or pulse.batches != self.batches:
            self.alive_at, self.batches = now, pulse.batches
        is_silent = now - self.alive_at > SILENT_SECONDS
        has_reason = self.is_dead or pulse.is_cut or pulse.is_doubted or is_silent
        if self.is_asked or now < self.due_at or not has_reason:
            return False
        self.is_asked = True
        return True

    def alive(self, now: float) -> bool:
        """It answered; whether it was taken for dead."""
        was_dead, self.is_dead = self.is_dead, False
        self.is_asked, self.failures = False, 0
        self.alive_at, self.due_at = now, now + ASKED_AGAIN_SECONDS
        return was_dead

    def failed(self, now: float, *, is_certain: bool) -> bool:
        """It did not answer as it should; whether it is taken for dead from now on.

        is_certain: this one failure proves it.
        """
        self.is_asked, self.due_at = False, now + RETRY_SECONDS
        self.failures += 1
        if self.is_dead or not (is_certain or self.failures >= FAILURES_UNTIL_DEAD):
            return False
        self.is_dead = True
        return True


class Judge(IntEnum):
    """Who ejects an endpoint; the reason of the first one counts. None clears another's."""

    PROBE = 0
    SCRAPES = 1
    DOUBTS = 2


@dataclass(eq=False, slots=True)
class Upstream:
    """The record of one endpoint (ip:port).

    against: why it is ejected, by who says so. is_doubted: others answer in its place.
    failed_halves: requests that it shared with another worker and that failed, whoever's fault.
    """

    endpoint: str
    load: EndpointLoad = field(default_factory=EndpointLoad)
    outlier: Outlier = field(default_factory=Outlier)
    vital: Vital = field(default_factory=Vital)
    against: dict[Judge, str] = field(default_factory=dict)
    failures: dict[Judge, int] = field(default_factory=dict)
    is_doubted: bool = False
    failed_halves: int = 0
    workers: int = 0

    def reason(self, now: float) -> str:
        """Why it is ejected now, "" if it is not."""
        if self.against:
            return self.against[min(self.against)]
        return FAILING if self.outlier.is_left_out(now) else ""


class Upstreams:
    """The table of endpoints: each has a record while it has a worker.

    Figures for an endpoint without a record are ignored: its worker has gone.
    """

    def __init__(self) -> None:
        self._by_endpoint: dict[str, Upstream] = {}
        self.loads: dict[str, EndpointLoad] = {}  # theirs, which are read for every decision
        # those of the records that most decisions need not look at, since nothing speaks against
        # any other: by what requests showed, and by who ejects them
        self._suspects: set[Upstream] = set()
        self._ejected: set[Upstream] = set()

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self._by_endpoint.values())

    def get(self, endpoint: str) -> Upstream | None:
        """The record of an endpoint, None if there is none."""
        return self._by_endpoint.get(endpoint)

    def enter(self, endpoint: str) -> Upstream:
        """A worker is at an endpoint from now on."""
        record = self._by_endpoint.get(endpoint)
        if record is None:
            record = self._by_endpoint[endpoint] = Upstream(endpoint)
            self.loads[endpoint] = record.load
        record.workers += 1
        return record

    def leave(self, record: Upstream) -> None:
        """A worker is there no more; with the last one the record goes."""
        record.workers -= 1
        if not record.workers:
            del self._by_endpoint[record.endpoint]
            del self.loads[record.endpoint]
            self._suspects.discard(record)
            self._ejected.discard(record)

    @property
    def has_suspects(self) -> bool:
        """Whether the last answers of any endpoint speak against it."""
        return bool(self._suspects)

    def answered(self, endpoint: str, status: int, now: float) -> float | None:
        """Takes the status of an endpoint's response; returns what `Outlier.answered` does."""
        record = self._by_endpoint.get(endpoint)
        if record is None:
            return None
        changed = record.outlier.answered(status, now)
        self._note_suspect(record)
        return changed

    def failed_half(self, endpoint: str) -> None:
        """A request failed that an endpoint shared with another one."""
        record = self._by_endpoint.get(endpoint)
        if record is not None:
            record.failed_halves += 1

    def doubt(self, endpoint: str, *, is_doubted: bool) -> None:
        """Others answer in the place of an endpoint, or it was seen to answer itself."""
        record = self._by_endpoint.get(endpoint)
        if record is not None and record.is_doubted != is_doubted:
            record.is_doubted = is_doubted
            self._note_suspect(record)

    def is_suspect(self, endpoint: str) -> bool:
        """Whether the answers to requests speak against an endpoint."""
        record = self._by_endpoint.get(endpoint)
        return record is not None and record in self._suspects

    def fail(self, record: Upstream, judge: Judge, limit: int, reason: str) -> bool:
        """Counts a failure; whether it is ejected from now on, by so many in a row."""
        if not self._has(record):
            return False
        failures = record.failures[judge] = record.failures.get(judge, 0) + 1
        if failures < limit or judge in record.against:
            return False
        self.eject(record, judge, reason)
        return True

    def eject(self, record: Upstream, judge: Judge, reason: str) -> None:
        """Has an endpoint picked only where no other is left, until `restore`."""
        if self._has(record):
            record.against[judge] = reason
            self._ejected.add(record)

    def restore(self, record: Upstream, judge: Judge) -> bool:
        """A judge finds an endpoint well; whether it was ejected by that judge."""
        record.failures.pop(judge, None)
        was_ejected = record.against.pop(judge, None) is not None
        if not record.against:
            self._ejected.discard(record)
        return was_ejected

    def ejected(self, now: float) -> Mapping[str, str]:
        """The endpoints that are ejected now, and why."""
        if not (self._suspects or self._ejected):
            return _NONE
        for record in [one for one in self._suspects if one.outlier.is_over(now)]:
            record.outlier.forget()
            self._note_suspect(record)
        known = (*self._suspects, *self._ejected)
        return {one.endpoint: reason for one in known if (reason := one.reason(now))}

    def doubted(self) -> Collection[str]:
        """The endpoints whose last answer failed in a way that asks for their health."""
        return [one.endpoint for one in self._suspects if one.is_doubted]

    def reason(self, endpoint: str, now: float) -> str:
        """Why an endpoint is ejected now, "" if it is not."""
        record = self._by_endpoint.get(endpoint)
        return "" if record is None else record.reason(now)

    def _has(self, record: Upstream) -> bool:
        """Whether a record counts still: its worker may be gone, or elsewhere."""
        return self._by_endpoint.get(record.endpoint) is record

    def _note_suspect(self, record: Upstream) -> None:
        if record.outlier.failures or record.is_doubted:
            self._suspects.add(record)
        else:
            self._suspects.discard(record)
