"""Whether requests may name the ranks of a worker, and by its feed whether it obeys.

The rules are in `extproc.routing.pins`.
"""

import logging
from typing import Any

from extproc.config.schema import AUTO, Config
from extproc.fleet.record import Table, Worker
from extproc.routing.load import Booking
from extproc.routing.pins import NO_CHOICE, RankChoice, choice_of
from extproc.routing.ranks import rank_name
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap, Prompt

log = logging.getLogger("kvsteer.workers")


class RankPins:
    """The ranks that requests name to the workers of a router.

    Without a configured header, ranks are named as each worker's engine and release read them.
    """

    def __init__(self, config: Config, table: Table, fleet: FollowedWorkers) -> None:
        configured = config.policy.rank_header
        self._is_on = configured is not None
        self._header = None if configured == AUTO else rank_name(configured)
        self._table = table
        self._fleet = fleet
        self.note_change()

    def note_change(self) -> None:
        """Notes that feeds or engines changed: whether any request may name a rank now."""
        self._fleet.names_ranks = self._is_on and any(
            self._fleet.ranks(one.name) > 1 and (self._header or one.engine) for one in self._table
        )

    def choice(self, name: str, path: str, *, writes_body: bool) -> RankChoice:
        """Returns how a request on a path may name a rank of a worker.

        writes_body: whether the request's body may be changed.
        """
        worker = self._table.get(name)
        if worker is None:
            return NO_CHOICE
        choice = choice_of(self._header, worker.engine, worker.pin_findings, path)
        pin = choice.pin
        return NO_CHOICE if pin is not None and pin.in_body and not writes_body else choice

    def note_computed(
        self, worker: Worker, booking: Booking, prompt: Prompt, overlap: Overlap
    ) -> None:
        """Notes which rank computed a request, if it named one.

        overlap: of the rank that holds most of the prompt, now that the worker computed it.
        """
        named = booking.rank
        if named is None:
            return
        # another request with the same prompt may have been computed by another rank
        is_obeyed = overlap.rank == named.rank or self._holds(worker, named.rank, prompt, overlap)
        findings = worker.pin_findings
        was_refuted = findings.is_refuted(named.path)
        findings.note(named.path, is_obeyed=is_obeyed)
        if findings.is_refuted(named.path) and not was_refuted:
            log.warning(
                "worker %s ignores the rank that requests to %s name in %s: none is named there"
                " any more, and the blocks of one rank count as uncertain",
                worker.name,
                named.path,
                named.pin.name,
            )

    def _holds(self, worker: Worker, rank: int, prompt: Prompt, best: Overlap) -> bool:
        held = self._fleet.overlap_of_rank(worker.name, rank, prompt)
        return held is not None and held.rank_order[:2] >= best.rank_order[:2]

    def as_json(self, worker: Worker) -> list[dict[str, Any]]:
        """Returns what is shown of a worker's pins, a row a path of which anything was found."""
        findings = worker.pin_findings
        return [
            {
                "path": path,
                "obeyed": findings.obeyed.get(path, 0),
                "ignored": findings.ignored.get(path, 0),
                "named": not findings.is_refuted(path),
            }
            for path in findings.paths
        ]
