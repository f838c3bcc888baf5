"""What the admin server remembers: the last decisions and prompts, and the fleet over time.

All of it is bounded, and cheap to keep.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from extproc.admin.history import Figures, History
from extproc.admin.prefixes import RecentPrompts
from extproc.admin.recent import RecentDecisions
from extproc.features.feature import Feature
from extproc.requests.request import RoutingRequest
from extproc.routing.decision import Basis, Decision
from extproc.routing.inputs.query import Query

# Nobody reads more decisions per second than this. Keeping one touches memory, which evicts the
# decisions' own data from the processor's caches.
KEPT_PER_SECOND = 50
KEPT_AT_ONCE = 512


class Observations(Feature):
    """The last decisions and prompts, and the fleet over time.

    Decisions are kept up to a rate, with room for bursts; every request counts in the figures.

    clock: seconds since the epoch. kept_at_once: how many decisions of a burst are kept.
    is_closed: whether the router is stopping, so that no more will follow.
    """

    def __init__(self, clock: Callable[[], float], kept_at_once: int = KEPT_AT_ONCE) -> None:
        self._clock = clock
        self.is_closed = False
        self.recent = RecentDecisions()
        self.prompts = RecentPrompts()
        self.history = History()
        self._routed: dict[str, _StepTokens] = {}
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
        if basis.prompt_tokens and worker and decision.is_steered:
            routed = self._routed.get(worker)
            if routed is None:
                routed = self._routed[worker] = _StepTokens()
            routed.prompt_tokens += basis.prompt_tokens
            routed.held_tokens += basis.certain_tokens
            if is_kept:  # this reads every worker, so it is not done for each of very many requests
                routed.compared_tokens += basis.prompt_tokens
                routed.average_tokens += mean_held_tokens(basis)

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
        routed, self._routed = self._routed, {}
        nothing = _StepTokens()
        figures = {
            name: Figures(*fill, *routed.get(name, nothing).figures())
            for name, fill in fills.items()
        }
        self.history.sample(at, figures)


@dataclass(slots=True)
class _StepTokens:
    """Prompt tokens of one step's requests to a worker.

    held_tokens: tokens that it certainly held. compared_tokens: tokens of the requests for which
    every worker was compared. average_tokens: of these, how many the workers held on average.
    """

    prompt_tokens: int = 0
    held_tokens: int = 0
    compared_tokens: int = 0
    average_tokens: float = 0.0

    def figures(self) -> tuple[int, int, int]:
        """Returns the tokens of all prompts, those held, and those held on average.

        If no request was compared, the held tokens are used as the average: nothing was saved.
        """
        average: float = self.held_tokens
        if self.compared_tokens:
            average = self.average_tokens * self.prompt_tokens / self.compared_tokens
        return self.prompt_tokens, self.held_tokens, round(average)


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
