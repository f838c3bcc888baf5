"""What the admin server remembers: the last decisions and prompts, and the fleet over time.

All of it is bounded, and cheap to keep.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from extproc.admin.history import Figures, History
from extproc.admin.prefixes import RecentPrompts
from extproc.admin.recent import RecentDecisions
from extproc.config.policies import POLICIES
from extproc.features.feature import Feature
from extproc.observing.outcomes import Outcome
from extproc.observing.report import STEERED, side_of
from extproc.requests.request import RoutingRequest
from extproc.routing.decision import Basis, Decision
from extproc.routing.inputs.query import Query

# Nobody reads more decisions per second than this. Keeping one touches memory, which evicts the
# decisions' own data from the processor's caches.
KEPT_PER_SECOND = 50
KEPT_AT_ONCE = 512


class Observations(Feature):
    """The last decisions and prompts, and the fleet over time.

    Decisions are kept up to a rate, with room for bursts; the figures count every steered request.

    clock: seconds since the epoch. kept_at_once: how many decisions of a burst are kept.
    is_closed: whether the router is stopping, so that no more will follow.
    """

    def __init__(self, clock: Callable[[], float], kept_at_once: int = KEPT_AT_ONCE) -> None:
        self._clock = clock
        self.is_closed = False
        self.recent = RecentDecisions()
        self.prompts = RecentPrompts()
        self.history = History()
        self._steps: dict[str, _StepTokens] = {}
        # Each kept decision uses up a share of a second. None is kept while the shares reach
        # further ahead of the time than those of a burst; half a share allows for rounding.
        self._burst_seconds = (kept_at_once - 0.5) / KEPT_PER_SECOND
        self._used_until = self._kept_at = 0.0

    def begin(self, request: RoutingRequest, query: Query, decision: Decision, now: float) -> None:
        """Records a request that was routed."""
        clock = self._clock
        at = clock()
        is_kept = self._may_keep(at)
        if is_kept:
            self.recent.add(decision, at, request.head)
            for prompt in query.prompts:
                self.prompts.add(prompt)
        basis, worker = decision.basis, decision.worker
        is_counted = decision.is_steered and POLICIES[basis.policy].reads_caches
        if basis.prompt_tokens and worker and is_counted:
            routed = self._step_of(worker)
            routed.prompt_tokens += basis.prompt_tokens
            routed.held_tokens += basis.certain_tokens
            if is_kept:  # this reads every worker, so it is not done for each of very many requests
                routed.compared_tokens += basis.prompt_tokens
                routed.average_tokens += mean_held_tokens(basis)

    def note_end(
        self, decision: Decision, outcome: Outcome | None, *, is_booked: bool, is_sent: bool
    ) -> None:
        """Counts what an engine reported that it found in its cache for a steered request.

        One that a cache-unaware policy placed says nothing of what steering brings.
        """
        if outcome is None or outcome.reported.cached_tokens is None:
            return
        if not outcome.worker or side_of(outcome) != STEERED:
            return
        # our own count first: releases disagree on whether the parts of /v1/messages overlap
        tokens = outcome.prompt_tokens or outcome.reported.prompt_tokens or 0
        step = self._step_of(outcome.worker)
        step.answered_tokens += tokens
        step.reported_tokens += min(outcome.reported.cached_tokens, tokens)

    def _step_of(self, worker: str) -> "_StepTokens":
        step = self._steps.get(worker)
        if step is None:
            step = self._steps[worker] = _StepTokens()
        return step

    def note_server(self, decision: Decision, endpoint: str) -> None:
        """Records which endpoint answered a request."""
        self.recent.note_server(decision, endpoint)

    def _may_keep(self, at: float) -> bool:
        if at < self._kept_at:  # the clock was set back
            self._used_until -= self._kept_at - at
            self._kept_at = at
        if self._used_until - at > self._burst_seconds:
            return False
        self._used_until = max(self._used_until, at) + 1.0 / KEPT_PER_SECOND
        self._kept_at = at
        return True

    def sample(self, at: float, fills: Mapping[str, tuple[int, int]]) -> None:
        """Ends a step of the history.

        fills: requests in flight and blocks of every worker. at: seconds since the epoch.
        """
        steps, self._steps = self._steps, {}
        nothing = _StepTokens()
        figures = {
            name: Figures(*fill, *steps.get(name, nothing).figures())
            for name, fill in fills.items()
        }
        self.history.sample(at, figures)


@dataclass(slots=True)
class _StepTokens:
    """Prompt tokens of one step's requests to a worker, and of those that it answered."""

    prompt_tokens: int = 0
    # That it certainly held.
    held_tokens: int = 0
    # Of the requests for which every worker was compared, and how many the workers held on average.
    compared_tokens: int = 0
    average_tokens: float = 0.0
    # Of the answers whose engine reported cached tokens, and these.
    answered_tokens: int = 0
    reported_tokens: int = 0

    def figures(self) -> tuple[int, int, int, int, int]:
        """Returns the tokens of `Figures`, in their order.

        If no request was compared, the held tokens are used as the average: nothing was saved.
        """
        average: float = self.held_tokens
        if self.compared_tokens:
            average = self.average_tokens * self.prompt_tokens / self.compared_tokens
        held = self.prompt_tokens, self.held_tokens, round(average)
        return *held, self.answered_tokens, self.reported_tokens


def mean_held_tokens(basis: Basis) -> float:
    """Returns how many prompt tokens a worker certainly held, on average over eligible workers.

    With the same caches, round robin would find this many.
    """
    possible = {
        worker.name
        for worker, excluded in zip(basis.workers, basis.excluded, strict=True)
        if not excluded
    }
    held = (
        overlap.certain_tokens
        for each in basis.overlaps
        for name, overlap in each.items()
        if name in possible
    )
    return sum(held) / max(len(possible), 1)
