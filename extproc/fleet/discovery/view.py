"""Views, which sources report, and the fleet that is merged from them.

A source always reports its whole view, never a difference: a worker that it no longer lists is
removed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from extproc.base.address import Address
from extproc.base.engine import CONFIGURED
from extproc.config.feed_kinds import found_events
from extproc.config.schema import EventPorts, FoundWorker, WorkerEvents, WorkerSettings

# More from one source is a mistake, such as a selector that takes in the whole cluster.
MAX_FOUND = 10_000

STATIC = "workers"


@dataclass(frozen=True, slots=True)
class Sighting:
    """One worker as a source sees it.

    excluded: why it gets no requests now, "" if it may. identity: distinguishes an engine from a
    later one at the same address. adapters: the adapter's name for each number, if its events carry
    only numbers. engine_source: who says which engine it is, if the worker's `engine` does. pod:
    the name of its pod, "" without one.
    """

    worker: WorkerSettings
    excluded: str = ""
    identity: str = ""
    adapters: tuple[tuple[int, str], ...] = ()
    engine_source: str = CONFIGURED
    pod: str = ""


class FleetMember(NamedTuple):
    """A worker of the fleet, and the name of the source that it is taken from."""

    sighting: Sighting
    source: str


View = Sequence[Sighting]
Fleet = Mapping[str, FleetMember]  # by endpoint as it was configured or found


def listed(workers: Sequence[WorkerSettings]) -> tuple[Sighting, ...]:
    """Returns the view of a list in the form of the configuration's `workers`."""
    return tuple(Sighting(worker) for worker in workers)


def merged(views: Mapping[str, View]) -> dict[str, FleetMember]:
    """Merges all views into the fleet; the first source of an endpoint describes its worker."""
    fleet: dict[str, FleetMember] = {}
    for source, view in views.items():
        for found in view:
            fleet.setdefault(found.worker.endpoint, FleetMember(found, source))
    return fleet


def doubles(views: Mapping[str, View]) -> Iterator[tuple[str, str]]:
    """Yields each endpoint that two sources name: the later source, and the note about it."""
    first: dict[str, str] = {}
    for source, view in views.items():
        for found in view:
            owner = first.setdefault(found.worker.endpoint, source)
            if owner != source:
                yield source, f"{found.worker.endpoint} is taken from {owner}, which names it too"


class TakeView(Protocol):
    """Accepts all workers that a source lists now."""

    def __call__(self, view: View, note: str, fault: str = "") -> None:
        """Accepts a view.

        note: what is wrong with some of its workers. fault: as in `Report`. Each is "" if there is
        none.
        """


class SourceReport(NamedTuple):
    """Where a source reports; each may be called at any time.

    view: reports all workers. confirm: reports that the last view is still current. fault: reports
    in words why nothing is known now; the last view stays.
    """

    view: TakeView
    confirm: Callable[[], None]
    fault: Callable[[str], None]


class Source(Protocol):
    """Something that finds workers."""

    @property
    def name(self) -> str:
        """Its name in the log and in metrics; there are only a few."""

    async def run(self, report: SourceReport) -> None:
        """Reports until it is cancelled; reports failures as faults and tries again."""


class PartReports:
    """Joins the reports of a source's parts into one: a fault lasts until its own part recovers.

    A fault that several parts report in the same words is reported once, and a view that arrives
    while another part fails does not end that part's fault.
    """

    def __init__(self, report: SourceReport) -> None:
        self._report = report
        self._faults: dict[str, str] = {}

    def viewing(self, part: str) -> SourceReport:
        """Returns the report of the part that provides the views and confirms them."""
        return SourceReport(
            self._view, lambda: self._confirm(part), lambda fault: self._note(part, fault)
        )

    def part_report(self, part: str) -> SourceReport:
        """Returns the report of a part without views: its `confirm` only ends its own fault."""
        return self.viewing(part)._replace(confirm=lambda: self._confirm_aside(part))

    def _view(self, view: View, note: str, fault: str = "") -> None:
        self._report.view(view, note, fault or self._fault())

    def _confirm(self, part: str) -> None:
        if not self._heal(part) and not self._faults:
            self._report.confirm()

    def _confirm_aside(self, part: str) -> None:
        self._heal(part)

    def _note(self, part: str, fault: str) -> None:
        self._faults[part] = fault
        self._report.fault(self._fault())

    def _heal(self, part: str) -> bool:
        """Ends the fault of a part and reports those left; returns whether it had one."""
        if self._faults.pop(part, None) is None:
            return False
        if self._faults:
            self._report.fault(self._fault())
        else:
            self._report.confirm()
        return True

    def _fault(self) -> str:
        return "; ".join(dict.fromkeys(self._faults.values()))


def worker_at(
    host: str, port: int, of_all: FoundWorker, *, draining: bool = False, offset: int = 0
) -> WorkerSettings:
    """Returns the worker at host:port.

    host: an IP address. of_all: the settings that the source's workers share. offset: how many
    engines on the same host come before it; each uses a gRPC port, or for each ZMQ endpoint as many
    ports as it has ranks.
    """
    return WorkerSettings(
        endpoint=str(Address(host, port)),
        model=of_all.model,
        block_size=of_all.block_size,
        events=_events(host, port, of_all.events, offset),
        lora=of_all.lora,
        learn=of_all.learn,
        engine=of_all.engine,
        draining=draining,
        role=of_all.role,
    )


def _events(
    host: str, port: int, ports: EventPorts | Literal["auto"] | None, offset: int
) -> WorkerEvents | Literal["auto"] | None:
    if not isinstance(ports, EventPorts):
        return ports

    return found_events(ports, Address(host, port), offset)
