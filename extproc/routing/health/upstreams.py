"""The records of upstreams: the load of each endpoint, and any reasons against picking it.

A worker that refuses at once has nothing in flight and nothing queued, so to a balancer it looks
idle, and attracts requests that the others could serve. Envoy's own outlier detection does not
prevent this: Envoy uses the endpoint that is named to it whether it has ejected it or not. The same
holds for a dead worker.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from extproc.routing.health.evidence import RULES, Evidence, Judge
from extproc.routing.health.probe_schedule import ProbeSchedule
from extproc.routing.health.statuses import is_workers_failure
from extproc.routing.load.endpoint_load import EndpointLoad

FAILING = "answers request after request with failures"

_NONE: Mapping[str, str] = {}


@dataclass(eq=False, slots=True)
class Upstream:
    """The record of one endpoint (ip:port).

    probes: when it is due for a health probe. evidence: what each judge has against it, in the
    order of judges; no entry if that is nothing. is_doubted: whether its health is in doubt, for
    example because others answer in its place. failed_halves: failed requests that it shared with
    another worker, whichever of them was at fault.
    """

    endpoint: str
    load: EndpointLoad = field(default_factory=EndpointLoad)
    probes: ProbeSchedule = field(default_factory=ProbeSchedule)
    evidence: dict[Judge, Evidence] = field(default_factory=dict)
    is_doubted: bool = False
    failed_halves: int = 0
    workers: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether its last answer was a failure, or its health is in doubt."""
        return self.is_doubted or Judge.ANSWERS in self.evidence

    @property
    def is_down(self) -> bool:
        """Whether it is ejected until a judge restores it, and not only for a while."""
        return any(one.until == math.inf for one in self.evidence.values())

    def is_ejected_by(self, judge: Judge, now: float) -> bool:
        """Returns whether this judge ejects it now."""
        found = self.evidence.get(judge)
        return found is not None and now < found.until

    def reason(self, now: float) -> str:
        """Returns why it is ejected now, "" if it is not."""
        for one in self.evidence.values():
            if now < one.until:
                return one.reason
        return ""


class Upstreams:
    """The table of endpoints: each has a record while it has a worker.

    Figures for an endpoint without a record are ignored: its worker has gone.
    """

    def __init__(self) -> None:
        self._by_endpoint: dict[str, Upstream] = {}
        self.loads: dict[str, EndpointLoad] = {}  # their load records, which every decision reads
        # the only records that may be ejected; most decisions need to check no others
        self._suspects: set[Upstream] = set()
        self._down: set[Upstream] = set()

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
            self._down.discard(record)

    @property
    def has_suspects(self) -> bool:
        """Whether any endpoint has failed lately, or is in doubt."""
        return bool(self._suspects)

    @property
    def has_bad(self) -> bool:
        """Whether anything speaks against any endpoint: a failure, a doubt, a judge."""
        return bool(self._suspects or self._down)

    def note_answer(self, endpoint: str, status: int, now: float) -> float | None:
        """Records the status of an endpoint's response: a failure is 429, or 5xx.

        Returns for how many seconds the endpoint is ejected from now on; 0 if it was ejected and no
        longer is; None if nothing changed.
        """
        record = self._by_endpoint.get(endpoint)
        if record is None:
            return None
        if is_workers_failure(status):
            return self.note_failure(record, Judge.ANSWERS, FAILING, now) or None
        if record.evidence and self.restore(record, Judge.ANSWERS):
            return 0.0
        return None

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
            self._sort(record)

    def note_failure(
        self, record: Upstream, judge: Judge, reason: str, now: float, *, is_certain: bool = False
    ) -> float:
        """Counts a failure, and ejects the endpoint after as many in a row as the rule says.

        is_certain: whether this one alone is enough.
        Returns for how many seconds it is ejected from now on; 0 if it is not, or was before.
        """
        if not self._has(record):
            return 0.0
        found = self._evidence(record, judge)
        is_enough = found.note_failure(now) or is_certain
        if not is_enough or now < found.until:
            return 0.0
        return self.eject(record, judge, reason, now)

    def eject(self, record: Upstream, judge: Judge, reason: str, now: float) -> float:
        """Ejects an endpoint by the judge's rule: it is picked only if no other is left.

        Returns for how many seconds: infinite if only `restore` ends it.
        """
        if not self._has(record):
            return 0.0
        seconds = self._evidence(record, judge).eject(reason, now)
        self._sort(record)
        return seconds

    def restore(self, record: Upstream, judge: Judge) -> bool:
        """Forgets what a judge has against an endpoint; returns whether it had ejected it."""
        found = record.evidence.pop(judge, None)
        if self._has(record):
            self._sort(record)
        return found is not None and found.seconds > 0

    def ejections(self, now: float) -> Mapping[str, str]:
        """Returns the endpoints that are ejected now, and why."""
        if not (self._suspects or self._down):
            return _NONE
        over = [
            (record, judge)
            for record in self._suspects
            for judge, one in record.evidence.items()
            if now > one.forgotten_at
        ]
        for record, judge in over:
            self.restore(record, judge)
        known = (*self._suspects, *self._down)
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

    def _evidence(self, record: Upstream, judge: Judge) -> Evidence:
        """Returns what a judge has against an endpoint; an entry without a failure if nothing."""
        found = record.evidence.get(judge)
        if found is None:
            found = Evidence(RULES[judge])
            record.evidence = dict(sorted([*record.evidence.items(), (judge, found)]))
            self._sort(record)
        return found

    def _sort(self, record: Upstream) -> None:
        """Keeps a record among those that may be ejected while it belongs there."""
        for kept, belongs in ((self._suspects, record.is_suspect), (self._down, record.is_down)):
            if belongs:
                kept.add(record)
            else:
                kept.discard(record)
