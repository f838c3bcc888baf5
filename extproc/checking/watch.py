"""Listens to workers for the self-check, logs results, and lowers the credit of distrusted ones."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from extproc.checking.evidence import Asked, usable_tokens
from extproc.checking.self_check import (
    MAX_PROMPT_TOKENS,
    Placed,
    Verification,
    Watched,
    WorkerCheck,
)
from extproc.requests.prompt import ALL_FORMS
from kvstate.events import Body, Event, EventBatch
from kvstate.feeds.feed import State
from kvstate.fleet import Fleet
from kvstate.overlap import Overlap, Prompt, Tokens
from kvstate.wire.zmq_wire import decoding

log = logging.getLogger("kvsteer.tokens")

# The state of a worker whose feed is complete, but whose tokens differ from KVSteer's.
DIFFERS = "differs"

# Most workers listened to at once, over the whole fleet.
MAX_LISTENED = 8

# Most workers whose stored blocks are remembered after they were listened to.
MAX_REMEMBERED = 16

# How many earlier prompts of the same model a request is compared with: what they share is no
# prompt's own.
REFERENCES = 8

# Limit of recently placed prompts that are kept, over the whole fleet: a worker may still be
# computing one when listening to it begins.
LATELY_PLACED = 512


class HasCheck(Protocol):
    """The record of a worker."""

    @property
    def check(self) -> WorkerCheck:
        """Its self-check."""


class Trust(Protocol):
    """What workers are trusted to hold for one request."""

    def overlaps(self, prompt: Prompt) -> Mapping[str, Overlap]:
        """Returns what each worker holds of a prompt: nothing certain if its tokens differ."""

    def state(self, worker: str) -> str:
        """Returns the state of a worker's feeds; DIFFERS if its tokens differ."""


# How long one batch may take: decisions wait meanwhile. A normal one takes a few milliseconds.
MAX_LOOK_SECONDS = 0.01
EVENTS_AT_ONCE = 8  # between two looks at the clock


class SelfCheck:
    """The self-check of all workers.

    records: of the workers, by name. monotonic: returns seconds, to find what is due. cpu: returns
    CPU seconds of this thread. A worker is listened to only while a request is watched and there is
    a reason: for one that is well, the index shows after a request whether it holds our blocks.
    """

    def __init__(
        self,
        fleet: Fleet,
        records: Mapping[str, HasCheck],
        monotonic: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._fleet = fleet
        self._records = records
        self._monotonic = monotonic
        self._cpu = cpu
        # weak: a check ends with the record that it is part of
        self._listened: WeakSet[WorkerCheck] = WeakSet()
        self._remembered: WeakKeyDictionary[WorkerCheck, None] = WeakKeyDictionary()  # latest last
        self._distrusted: WeakSet[WorkerCheck] = WeakSet()  # for requests of some forms, or all
        self._references: dict[str, deque[Tokens]] = {}  # by model
        self._lately: deque[tuple[float, str, Tokens]] = deque(maxlen=LATELY_PLACED)

    def placed(self, worker: str, prompts: Sequence[Prompt]) -> None:
        """Records prompts sent to a worker, watched or not: the next stores may be about them."""
        now = self._monotonic()
        check = self._check(worker)
        for prompt in prompts:
            if len(prompt.tokens) <= MAX_PROMPT_TOKENS:
                self._lately.append((now, worker, prompt.tokens))
            if check is not None and check.is_listened:
                check.placed.add(prompt.tokens, now)

    def watch(self, worker: str, prompt: Prompt, overlap: Overlap | None) -> Watched | None:
        """Watches a request sent to a worker if it may give evidence; returns the watch, or None.

        prompt: tokenized here. overlap: what the worker holds of it. The caller passes the watch to
        `ended` when the request is over.
        """
        now = self._monotonic()
        check = self._check(worker)
        if check is None:
            return None
        if check.pending:
            self._conclude_due(check)
        # the conditions that most requests fail come first, and take a microsecond
        if not check.may_watch(now) or self._fleet.state(worker) is not State.LIVE:
            return None
        if not check.is_well and not self._may_listen(check, now):
            return None
        held = overlap.certain_tokens + overlap.uncertain_tokens if overlap else 0
        if len(prompt.tokens) > MAX_PROMPT_TOKENS or self._is_cached(worker, prompt, held):
            return None
        references = self._references.setdefault(prompt.model, deque(maxlen=REFERENCES))
        watched = check.watch(Asked(prompt, held, tuple(references)), now)
        references.append(prompt.tokens)
        if watched is not None and watched.is_heard:
            self._listen(check)
        return watched

    def ended(self, watched: Watched) -> None:
        """Records that a watched request has ended."""
        watched.ended_at = self._monotonic()

    def refused(self, watched: Watched) -> None:
        """Gives up a request that the worker refused: the stores are about other requests."""
        for record in self._records.values():
            if watched in record.check.pending:
                record.check.give_up(watched)

    def of(self, forms: int) -> Trust:
        """Returns the trust in workers for a request of these forms."""
        return _OfForms(self, forms) if self._distrusted else self

    def overlaps(self, prompt: Prompt, forms: int = ALL_FORMS) -> Mapping[str, Overlap]:
        """Returns the fleet's overlaps, but nothing certain for workers whose tokens differ."""
        found = self._fleet.overlaps(prompt)
        if self._distrusted:
            for check in self._distrusted:
                overlap = found.get(check.worker)
                if overlap is not None and self._differs(check, forms):
                    size, tiers, uncertain, rank = overlap
                    found[check.worker] = Overlap(size, uncertain=sum(tiers) + uncertain, rank=rank)
        return found

    def state(self, worker: str, forms: int = ALL_FORMS) -> str:
        """Returns the fleet's state, or DIFFERS if the worker's tokens differ for these forms."""
        state = self._fleet.state(worker)
        check = self._check(worker) if state is State.LIVE and self._distrusted else None
        return DIFFERS if check is not None and self._differs(check, forms) else state.value

    def _differs(self, check: WorkerCheck, forms: int) -> bool:
        return bool(check.distrusted_forms & forms) and self._check(check.worker) is check

    def judge(self, check: WorkerCheck, verification: Verification) -> None:
        """Records the result of golden requests for a worker's tokens."""
        check.verify(verification)
        self._note(check)

    def status(self, worker: str) -> dict[str, Any]:
        """Returns the result of a worker's self-check, as GET /workers shows it."""
        check = self._check(worker)
        if check is None:
            return _shown(WorkerCheck(worker))
        self._conclude_due(check)
        return _shown(check)

    def _check(self, worker: str) -> WorkerCheck | None:
        record = self._records.get(worker)
        return None if record is None else record.check

    def _may_listen(self, check: WorkerCheck, now: float) -> bool:
        if not check.effort.may_begin(now):
            return False
        if not check.is_listened and len(self._listened) >= MAX_LISTENED:
            for other in list(self._listened):  # a silent worker's checks do not end otherwise
                self._conclude_due(other)
        return check.is_listened or len(self._listened) < MAX_LISTENED

    def _is_cached(self, worker: str, prompt: Prompt, held_tokens: int) -> bool:
        """Returns whether the engine has nothing to store for a prompt."""
        block_size = self._fleet.block_size(worker)
        return block_size is not None and usable_tokens(prompt.tokens, block_size) <= held_tokens

    def _listen(self, check: WorkerCheck) -> None:
        worker = check.worker
        if not check.is_listened:
            for placed_at, name, tokens in self._lately:
                if name == worker:
                    check.placed.add(tokens, placed_at)
        check.is_listened = True
        self._listened.add(check)
        self._fleet.listen(worker, lambda rank, body: self._heard(worker, rank, body))

    def _heard(self, worker: str, rank: int, body: Body) -> None:
        check, began = self._check(worker), self._cpu()
        if check is None:  # the worker is gone, and its feed soon will be
            return
        is_whole = self._fleet.state(worker) is State.LIVE and self._take(check, rank, body, began)
        may_go_on = check.effort.spend(self._cpu() - began, self._monotonic())
        if not is_whole or not may_go_on:
            for watched in list(check.pending):  # what it stored meanwhile is not known
                check.give_up(watched)
        self._conclude_due(check)

    def _take(self, check: WorkerCheck, rank: int, body: Body, began: float) -> bool:
        """Applies a batch; returns False if that takes too long."""
        events = body.events if isinstance(body, EventBatch) else self._decoded(body, began)
        for number, event in enumerate(events or ()):
            if number % EVENTS_AT_ONCE == 0 and self._is_long(began):
                return False
            check.stored(rank, (event,))
        return events is not None

    def _decoded(self, payload: bytes, began: float) -> Sequence[Event] | None:
        """Returns the events of a batch; None if decoding alone takes too long."""
        steps = decoding(payload)
        while True:
            try:
                for _ in range(EVENTS_AT_ONCE):
                    next(steps)
            except StopIteration as end:
                batch: EventBatch = end.value
                return batch.events
            if self._is_long(began):
                return None

    def _is_long(self, began: float) -> bool:
        return self._cpu() - began > MAX_LOOK_SECONDS

    def _conclude_due(self, check: WorkerCheck) -> None:
        for watched in check.due(self._monotonic()):
            if not watched.is_heard and self._fleet.state(check.worker) is not State.LIVE:
                check.give_up(watched)  # the index is no evidence either
            else:
                check.conclude(watched, is_held=self._holds(check.worker, watched.asked.prompt))
        if not check.pending and check.is_listened:
            self._stop_listening(check)
        self._note(check)

    def _stop_listening(self, check: WorkerCheck) -> None:
        check.is_listened = False
        self._listened.discard(check)
        if self._check(check.worker) is check:  # else the feed belongs to another record
            self._fleet.listen(check.worker, None)
        check.placed = Placed()
        self._remembered.pop(check, None)
        self._remembered[check] = None
        if len(self._remembered) > MAX_REMEMBERED:
            oldest = next(iter(self._remembered))
            del self._remembered[oldest]
            if not oldest.is_listened:
                oldest.forget_chains()

    def _holds(self, worker: str, prompt: Prompt) -> bool:
        overlap = self._fleet.overlaps(prompt).get(worker)
        if overlap is None:
            return False
        held = overlap.certain_tokens + overlap.uncertain_tokens
        return held >= usable_tokens(prompt.tokens, overlap.block_size)

    def _note(self, check: WorkerCheck) -> None:
        if check.distrusted_forms:
            self._distrusted.add(check)
        else:
            self._distrusted.discard(check)
        result, found = check.result, check.result.difference
        if result.is_distrusted == check.is_raised:
            return
        if not result.is_distrusted:
            log.info("worker %s: its tokens match the router's again", check.worker)
        elif found is not None:
            log.warning(
                "worker %s: its tokens differ from the router's, last at position %d"
                " (ours %d, the engine's %s); its overlap counts as uncertain",
                check.worker,
                found.position,
                found.ours,
                "not seen" if found.engines is None else found.engines,
            )
        check.is_raised = result.is_distrusted


class _OfForms:
    """The trust in workers for requests of some forms, while the tokens of any worker differ."""

    def __init__(self, checks: SelfCheck, forms: int) -> None:
        self._checks = checks
        self._forms = forms

    def overlaps(self, prompt: Prompt) -> Mapping[str, Overlap]:
        return self._checks.overlaps(prompt, self._forms)

    def state(self, worker: str) -> str:
        return self._checks.state(worker, self._forms)


def _shown(check: WorkerCheck) -> dict[str, Any]:
    result, found = check.result, check.result.difference
    return {
        "checked": result.matched + result.mismatched,
        "matched": result.matched,
        "mismatched": result.mismatched,
        "without_evidence": result.without_evidence,
        "differs": bool(check.distrusted_forms),
        "position": found and found.position,
        "ours": found and found.ours,
        "engine": found and found.engines,
        "verification": check.verification.shown(),
    }
