"""The table that owns the records of all workers."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from extproc.fleet.discovery.view import Fleet as Members
from extproc.fleet.records.engine_identity import EngineAnswer
from extproc.fleet.records.worker import Worker
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.health.upstreams import Upstreams


@dataclass(slots=True)
class Changes:
    """What a new list of workers changed: those that are new, and those that have gone."""

    added: list[Worker] = field(default_factory=list)
    removed: list[Worker] = field(default_factory=list)


class Table:
    """All workers. Only this table adds, replaces and removes their records.

    by_name: the records, by name in the order of the fleet. upstreams: the records of their
    endpoints.
    """

    def __init__(self, members: Members) -> None:
        self.by_name: dict[str, Worker] = {}
        self.upstreams = Upstreams()
        self.replace(members)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        """Returns the number of workers."""
        return len(self.by_name)

    def get(self, name: str) -> Worker | None:
        """Returns the record of a worker, None if there is no such worker."""
        return self.by_name.get(name)

    def has(self, worker: Worker) -> bool:
        """Returns whether this is still the record of a worker."""
        return self.by_name.get(worker.name) is worker

    def replace(self, members: Members) -> Changes:
        """Replaces the list of workers and returns the changes; those that stay keep their records.

        Another engine at the same address is a new worker.
        """
        before, changes = dict(self.by_name), Changes()
        self.by_name.clear()
        for name, member in members.items():
            known = before.get(name)
            if known is not None and known.sighting.identity == member.sighting.identity:
                known.member = member
                known.identify()
                self.by_name[name] = before.pop(name)
            else:
                changes.added.append(Worker(name, member))
                self.by_name[name] = changes.added[-1]
        changes.removed = list(before.values())
        for worker in changes.added:
            self._place(worker, before.get(worker.name))
        for worker in changes.removed:
            self._remove(worker)
        return changes

    def move(self, worker: Worker, endpoint: str) -> None:
        """Moves a worker to another address; it gets the record of that endpoint."""
        before = worker.upstream
        if before is not None:
            self.upstreams.leave(before)
            worker.holdings.lose()
            worker.holdings = Holdings(worker.name)
            worker.identify(EngineAnswer())
        worker.upstream = self.upstreams.enter(endpoint)

    def _place(self, worker: Worker, before: Worker | None) -> None:
        """Gives a new worker an address: that of the old one of its name, or its own if an IP."""
        if before is not None and before.upstream is not None:
            self.upstreams.leave(before.upstream)
            worker.upstream = self.upstreams.enter(before.upstream.endpoint)
            before.upstream = None
        elif worker.place.is_ip:
            worker.upstream = self.upstreams.enter(str(worker.place))

    def _remove(self, worker: Worker) -> None:
        for question in list(worker.polls):
            worker.stop_asking(question)
        worker.holdings.lose()
        if worker.upstream is not None:
            self.upstreams.leave(worker.upstream)
            worker.upstream = None
