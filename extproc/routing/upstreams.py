"""The records of upstreams: the load of each endpoint, and any reasons against picking it.

A worker that refuses at once has nothing in flight and nothing queued, so to a balancer it looks
idle, and attracts requests that the others could serve. Envoy's own outlier detection does not
prevent this: Envoy uses the endpoint that is named to it whether it has ejected it or not. The same
holds for a dead worker.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from extproc.routing.load import EndpointLoad

# From this status on, the request has failed.
FIRST_FAILURE = 400

# Failures in a row that eject an endpoint, as many as for Envoy's outlier detection.
FAILURES_UNTIL_EJECTED = 5

# How long it is ejected the first time; twice as long each time it fails again right afterwards.
EJECTED_SECONDS = 1.0
MAX_EJECTED_SECONDS = 30.0

# This long after the last failure, all failures are forgotten.
FORGET_SECONDS = 90.0

# A worker with requests in flight that shows no sign of life for this long gets a health probe;
# this long after an answer it may be probed again, if the reason persists.
SILENT_SECONDS = 0.5
ASKED_AGAIN_SECONDS = 0.75

# This soon after a failed probe it is probed again.
RETRY_SECONDS = 0.25

# Failed probes in a row that eject it, if a single one proves nothing.
FAILURES_UNTIL_DEAD = 2

_NOT_FOUND = 404
_TOO_MANY_REQUESTS = 429
FIRST_SERVER_ERROR = 500


def is_uncomputed(status: int) -> bool:
    """Returns whether a worker that answers with this status has not computed the prompt.

    404 and 429 come before it is computed, and after a server error nothing is known to be stored.
    Any other status says nothing: engines check some parameters only after the prompt is computed.
    """
    return status in (_NOT_FOUND, _TOO_MANY_REQUESTS) or status >= FIRST_SERVER_ERROR


_NONE: Mapping[str, str] = {}

FAILING = "answers request after request with failures"


@dataclass(slots=True)
class Outlier:
    """The failures of one endpoint, in a row. Times are seconds of one monotonic clock."""

    failures: int = 0
    last_at: float = 0.0
    ejections: int = 0
    ejected_until: float = 0.0

    def note_answer(self, status: int, now: float) -> float | None:
        """Records a response's status: 429 and 5xx are failures, any other shows a sound worker.

        Returns for how many seconds the endpoint is ejected from now on; 0 if it was ejected and no
        longer is; None if nothing changed.
        """
        if status < FIRST_SERVER_ERROR and status != _TOO_MANY_REQUESTS:
            was_ejected = self.ejections
            self.forget()
            return 0.0 if was_ejected else None
        self.failures += 1
        self.last_at = now
        if self.failures < FAILURES_UNTIL_EJECTED or now < self.ejected_until:
            return None
        seconds = min(MAX_EJECTED_SECONDS, EJECTED_SECONDS * 2.0**self.ejections)
        self.ejections += 1
        self.ejected_until = now + seconds
        return seconds

    def forget(self) -> None:
        """Forgets all failures."""
        self.failures = self.ejections = 0
        self.last_at = self.ejected_until = 0.0

    def is_ejected(self, now: float) -> bool:
        """Returns whether it is ejected now."""
        return bool(self.failures) and now < self.ejected_until

    def is_over(self, now: float) -> bool:
        """Returns whether its last failure was too long ago to count."""
        return now - self.last_at > FORGET_SECONDS


class Pulse(NamedTuple):
    """The signs of whether a worker is alive.

    is_cut: whether its feed has no connection. batches: how many its feed has received so far.
    in_flight: its requests in flight. is_doubted: whether it is suspect: its answers fail, or its
    health is in doubt, for example because others answer in its place.
    """

    is_cut: bool = False
    batches: int = 0
    in_flight: int = 0
    is_doubted: bool = False


@dataclass(slots=True)
class Vital:
    """Whether an endpoint is due for a health probe, and whether it is alive.

    It is probed only for a reason: it failed, its feed has no connection, it is doubted, or it has
    requests but gave no sign of life for `SILENT_SECONDS`. Without a feed, a slow answer is such a
    silence. Times are seconds of one monotonic clock.
    """

    alive_at: float | None = None
    batches: int = 0
    due_at: float = 0.0
    failures: int = 0
    is_asked: bool = False
    is_dead: bool = False

    def is_due(self, pulse: Pulse, now: float) -> bool:
        """Returns whether to probe it now; if so, `end` must follow, whatever comes of it."""
        if self.alive_at is None or not pulse.in_flight or pulse.batches != self.batches:
            self.alive_at, self.batches = now, pulse.batches
        is_silent = now - self.alive_at > SILENT_SECONDS
        has_reason = self.is_dead or pulse.is_cut or pulse.is_doubted or is_silent
        if self.is_asked or now < self.due_at or not has_reason:
            return False
        self.is_asked = True
        return True

    def end(self, now: float) -> None:
        """Notes that a probe is over; without an answer, it is due again after a while."""
        self.is_asked, self.due_at = False, now + RETRY_SECONDS

    def note_life(self, now: float) -> bool:
        """Notes that it answered; returns whether it was considered dead."""
        was_dead, self.is_dead = self.is_dead, False
        self.is_asked, self.failures = False, 0
        self.alive_at, self.due_at = now, now + ASKED_AGAIN_SECONDS
        return was_dead

    def note_failure(self, now: float, *, is_certain: bool) -> bool:
        """Notes that its probe failed; returns whether this makes it count as dead.

        is_certain: whether this failure alone proves it.
        """
        self.is_asked, self.due_at = False, now + RETRY_SECONDS
        self.failures += 1
        if self.is_dead or not (is_certain or self.failures >= FAILURES_UNTIL_DEAD):
            return False
        self.is_dead = True
        return True


class Judge(IntEnum):
    """What can eject an endpoint; the lowest one's reason is shown. None clears another's."""

    SLEEP = 0
    PROBE = 1
    SCRAPES = 2
    DOUBTS = 3


@dataclass(eq=False, slots=True)
class Upstream:
    """The record of one endpoint (ip:port).

    against: why it is ejected, by judge. is_doubted: whether its health is in doubt, for example
    because others answer in its place. failed_halves: failed requests that it shared with another
    worker, whichever of them was at fault.
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
        """Returns why it is ejected now, "" if it is not."""
        if self.against:
            return self.against[min(self.against)]
        return FAILING if self.outlier.is_ejected(now) else ""


class Upstreams:
    """The table of endpoints: each has a record while it has a worker.

    Figures for an endpoint without a record are ignored: its worker has gone.
    """

    def __init__(self) -> None:
        self._by_endpoint: dict[str, Upstream] = {}
        self.loads: dict[str, EndpointLoad] = {}  # their load records, which every decision reads
        # the only records with something against them: failures or doubts, and ejections by judges;
        # most decisions need to check no others
        self._suspects: set[Upstream] = set()
        self._ejected: set[Upstream] = set()

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self._by_endpoint.values())

    def get(self, endpoint: str) -> Upstream | None:
        """Returns the record of an endpoint, None if there is none."""
        return self._by_endpoint.get(endpoint)

    def enter(self, endpoint: str) -> Upstream:
        """Adds a worker to an endpoint; returns the endpoint's record."""
        record = self._by_endpoint.get(endpoint)
        if record is None:
            record = self._by_endpoint[endpoint] = Upstream(endpoint)
            self.loads[endpoint] = record.load
        record.workers += 1
        return record

    def leave(self, record: Upstream) -> None:
        """Removes a worker from its endpoint, and the record with the last worker."""
        record.workers -= 1
        if not record.workers:
            del self._by_endpoint[record.endpoint]
            del self.loads[record.endpoint]
            self._suspects.discard(record)
            self._ejected.discard(record)

    @property
    def has_suspects(self) -> bool:
        """Whether any endpoint has failed lately, or is in doubt."""
        return bool(self._suspects)

    @property
    def has_bad(self) -> bool:
        """Whether anything speaks against any endpoint: a failure, a doubt, a judge."""
        return bool(self._suspects or self._ejected)

    def note_answer(self, endpoint: str, status: int, now: float) -> float | None:
        """Records the status of an endpoint's response; returns what `Outlier.note_answer` does."""
        record = self._by_endpoint.get(endpoint)
        if record is None:
            return None
        changed = record.outlier.note_answer(status, now)
        self._note_suspect(record)
        return changed

    def note_failed_half(self, endpoint: str) -> None:
        """Counts a failed request that an endpoint shared with another one."""
        record = self._by_endpoint.get(endpoint)
        if record is not None:
            record.failed_halves += 1

    def doubt(self, endpoint: str, *, is_doubted: bool) -> None:
        """Sets whether an endpoint's health is in doubt, for example if others answer for it."""
        record = self._by_endpoint.get(endpoint)
        if record is not None and record.is_doubted != is_doubted:
            record.is_doubted = is_doubted
            self._note_suspect(record)

    def is_suspect(self, endpoint: str) -> bool:
        """Returns whether an endpoint has failed lately, or is in doubt."""
        record = self._by_endpoint.get(endpoint)
        return record is not None and record in self._suspects

    def fail(self, record: Upstream, judge: Judge, limit: int, reason: str) -> bool:
        """Counts a failure; ejects after `limit` in a row, and returns whether it just did."""
        if not self._has(record):
            return False
        failures = record.failures[judge] = record.failures.get(judge, 0) + 1
        if failures < limit or judge in record.against:
            return False
        self.eject(record, judge, reason)
        return True

    def eject(self, record: Upstream, judge: Judge, reason: str) -> None:
        """Ejects an endpoint until `restore`: it is picked only if no other is left."""
        if self._has(record):
            record.against[judge] = reason
            self._ejected.add(record)

    def restore(self, record: Upstream, judge: Judge) -> bool:
        """Clears a judge's failures and ejection; returns whether that judge had ejected it."""
        record.failures.pop(judge, None)
        was_ejected = record.against.pop(judge, None) is not None
        if not record.against:
            self._ejected.discard(record)
        return was_ejected

    def ejections(self, now: float) -> Mapping[str, str]:
        """Returns the endpoints that are ejected now, and why."""
        if not (self._suspects or self._ejected):
            return _NONE
        for record in [one for one in self._suspects if one.outlier.is_over(now)]:
            record.outlier.forget()
            self._note_suspect(record)
        known = (*self._suspects, *self._ejected)
        return {one.endpoint: reason for one in known if (reason := one.reason(now))}

    def doubts(self) -> Collection[str]:
        """Returns the endpoints whose health is in doubt."""
        return [one.endpoint for one in self._suspects if one.is_doubted]

    def reason(self, endpoint: str, now: float) -> str:
        """Returns why an endpoint is ejected now, "" if it is not."""
        record = self._by_endpoint.get(endpoint)
        return "" if record is None else record.reason(now)

    def _has(self, record: Upstream) -> bool:
        """Returns whether a record still counts: its worker may have gone, or moved."""
        return self._by_endpoint.get(record.endpoint) is record

    def _note_suspect(self, record: Upstream) -> None:
        if record.outlier.failures or record.is_doubted:
            self._suspects.add(record)
        else:
            self._suspects.discard(record)
