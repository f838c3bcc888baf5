"""Whether requests may name the ranks of a worker, and by its feed whether it obeys.

The rules are in `extproc.routing.candidates.pins`.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from extproc.config.owned_headers import rank_name
from extproc.config.schema import AUTO, Config
from extproc.fleet.asking.polling import PeriodicCheck
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker
from extproc.routing.candidates.pins import NO_CHOICE, RankChoice, choice_of
from extproc.routing.load.endpoint_load import Ticket
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Prompt, usable_tokens

log = logging.getLogger("kvsteer.workers")


# How many requests are watched, how many of them are looked up at a time, and for how long one is.
MAX_WATCHED = 256
MAX_LOOKED_UP = 16
WATCH_SECONDS = 30.0


class _Watched(NamedTuple):
    """A request that names a rank. until: seconds of one monotonic clock."""

    worker: str
    endpoint: str
    ticket: Ticket
    prompt: Prompt
    until: float


class RankPins:
    """The ranks that requests name to the workers of a router.

    Without a configured header, ranks are named as each worker's engine and release read them.
    """

    def __init__(
        self,
        config: Config,
        table: Table,
        fleet: FollowedWorkers,
        monotonic: Callable[[], float],
    ) -> None:
        self._monotonic = monotonic
        self._watched: deque[_Watched] = deque(maxlen=MAX_WATCHED)
        configured = config.policy.rank_header
        self._is_on = configured is not None
        self._header = None if configured == AUTO else rank_name(configured)
        self._table = table
        self._blocks = fleet.blocks
        self._feeds = fleet.feeds
        self.check = PeriodicCheck(
            self._check, "the ranks of requests under way could not be looked up"
        )
        self.note_change()

    def note_change(self) -> None:
        """Notes that feeds or engines changed: whether any request may name a rank now."""
        self._blocks.names_ranks = self._is_on and any(
            self._feeds.ranks(one.name) > 1 and (self._header or one.engine) for one in self._table
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

    def watch(self, worker: str, ticket: Ticket, prompt: Prompt) -> None:
        """Watches which rank stores the prompt of a request that names one.

        prompt: one of which the worker lacks blocks that it will announce.
        """
        if ticket.rank is not None:
            until = self._monotonic() + WATCH_SECONDS
            self._watched.append(_Watched(worker, ticket.endpoint, ticket, prompt, until))

    def _check(self) -> None:
        """Looks up some of the watched prompts, the oldest first."""
        now = self._monotonic()
        for _ in range(min(len(self._watched), MAX_LOOKED_UP)):
            one = self._watched.popleft()
            worker = self._table.get(one.worker)
            # a request that another worker answered says nothing
            if worker is None or one.ticket.endpoint != one.endpoint or now > one.until:
                continue
            is_obeyed = self._is_obeyed(one)
            if is_obeyed is None:
                self._watched.append(one)
            else:
                self._note(worker, one.ticket, is_obeyed=is_obeyed)

    def _is_obeyed(self, one: _Watched) -> bool | None:
        """Returns whether the named rank stored a prompt; None while none has."""
        best = self._blocks.overlaps(one.prompt).get(one.worker)
        tokens = 0 if best is None else usable_tokens(one.prompt.tokens, best.block_size)
        if best is None or best.certain_tokens + best.uncertain_tokens < tokens:
            return None
        named = one.ticket.rank
        if named is None or best.rank == named.rank:
            return True
        # another request with the same prompt may have been computed by another rank
        held = self._blocks.overlap_of_rank(one.worker, named.rank, one.prompt)
        return held is not None and held.rank_order[:2] >= best.rank_order[:2]

    def _note(self, worker: Worker, ticket: Ticket, *, is_obeyed: bool) -> None:
        named, findings = ticket.rank, worker.pin_findings
        if named is None:
            return
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
