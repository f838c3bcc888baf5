"""Measures when the prompts under way at each worker are computed, by what its feed announces."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from extproc.fleet.asking.polling import PeriodicCheck
from extproc.fleet.records.worker import Worker
from extproc.routing.health.upstreams import Upstream
from extproc.routing.load.endpoint_load import Ticket
from extproc.routing.load.loads import Loads
from extproc.routing.load.speed import Speed
from kvstate.overlap import Overlap, Prompt, usable_tokens
from kvstate.seldom import is_logged

log = logging.getLogger("kvsteer.workers")

# How often prompts in flight are looked up in the index: the resolution of the measured times.
CHECK_SECONDS = 0.05

# One check in this many includes workers without waiting prompts: their measurements fade.
LOOKS_WHILE_IDLE = 20

# Looks after a batch has arrived, since it may take some time until it is applied.
LOOKS_A_BATCH = 2

# This many of a worker's oldest prompts are looked up: one whose answer was aborted before it was
# computed must not hide those behind it.
MAX_AHEAD = 3

# A check ends after this many tokens, over all workers: decisions wait meanwhile.
MAX_TOKENS_A_LOOK = 100_000


class Computed:
    """Notes in the load records when a prompt is computed, so that speeds are learned.

    overlaps, batches: the methods of `kvstate.fleet.FollowedWorkers`. block_size: returns the
    tokens in a worker's block, by its name. monotonic: the clock of the loads.
    """

    def __init__(
        self,
        workers: Iterable[Worker],
        loads: Loads,
        overlaps: Callable[[Prompt], Mapping[str, Overlap]],
        batches: Callable[[str], int],
        block_size: Callable[[str], int],
        monotonic: Callable[[], float],
    ) -> None:
        self._workers = workers
        self._loads = loads
        self._overlaps = overlaps
        self._batches = batches
        self._block_size = block_size
        self._monotonic = monotonic
        self._looks = 0
        self._failures = 0
        self._remaining_tokens = 0
        self._resume_after = ""  # the worker at which the previous check ended early
        self.check = PeriodicCheck(
            self._check, "prompts under way could not be looked up", CHECK_SECONDS
        )

    def _check(self) -> None:
        """Looks at the workers that are due, up to a limit of tokens."""
        self._looks += 1
        self._remaining_tokens = MAX_TOKENS_A_LOOK
        now, resting = self._monotonic(), self._looks % LOOKS_WHILE_IDLE == 0
        due = [
            (worker, upstream)
            for worker in self._workers
            if (upstream := worker.upstream) and (resting or upstream.load.speed.waiting)
        ]
        names = [worker.name for worker, _ in due]
        first = names.index(self._resume_after) if self._resume_after in names else 0
        self._resume_after = ""
        for worker, upstream in due[first:]:
            if self._remaining_tokens <= 0:
                self._resume_after = worker.name
                return
            try:
                self._look_at(worker, upstream, now)
            except Exception:  # one worker must not end the check of the others
                self._failures += 1
                if is_logged(self._failures):
                    log.exception("prompts under way at %s could not be looked up", worker.name)

    def _look_at(self, worker: Worker, upstream: Upstream, now: float) -> None:
        batches = self._batches(worker.name)
        if batches != worker.batches_seen:
            worker.batches_seen, worker.checks_due = batches, LOOKS_A_BATCH
        if worker.checks_due:
            worker.checks_due -= 1
            self._look_up(worker, upstream.load.speed, now)
        self._loads.look(upstream.endpoint, now)

    def _look_up(self, worker: Worker, speed: Speed[Ticket], now: float) -> None:
        for ticket in self._ahead(list(speed.waiting)):
            is_first = speed.is_first(ticket)
            if (ticket.is_sure or is_first) and ticket in speed.waiting:
                self._look_up_one(worker, ticket, now, is_first=is_first)

    def _ahead(self, waiting: Sequence[Ticket]) -> Sequence[Ticket]:
        """Returns the oldest prompts and, in turn, one of those behind them.

        So prompts that nothing announces cannot hide the others for long.
        """
        behind = len(waiting) - MAX_AHEAD
        if behind <= 0:
            return waiting
        return [*waiting[:MAX_AHEAD], waiting[MAX_AHEAD + self._looks % behind]]

    def _look_up_one(self, worker: Worker, ticket: Ticket, now: float, *, is_first: bool) -> None:
        prompt = ticket.prompt
        if prompt is None:
            return
        if not usable_tokens(prompt.tokens, self._block_size(worker.name)):
            self._loads.unseen(ticket)  # its blocks are larger than was known at the pick
            return
        self._remaining_tokens -= len(prompt.tokens)
        overlap = self._overlaps(prompt).get(worker.name)
        usable = usable_tokens(prompt.tokens, 1 if overlap is None else overlap.block_size)
        if overlap is not None and overlap.held_tokens >= usable:
            self._loads.note_computed(ticket, now)
        elif is_first and not ticket.is_sure:
            held = 0 if overlap is None else overlap.certain_tokens + overlap.uncertain_tokens
            self._loads.revise(ticket, len(prompt.tokens) - held)
