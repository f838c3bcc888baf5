"""What the admin server remembers of the requests that were routed; bounded, and cheap to keep."""

from collections.abc import Mapping, Sequence

from extproc.admin.history import Figures, History
from extproc.admin.prefixes import Prompts
from extproc.admin.recent import Recent
from extproc.picking.decision import Decision
from kvstate.overlap import Prompt

# Of a stream of requests, nobody reads more decisions than these; what is kept is touched anew at
# every request, and drives what decisions need out of the processor's caches.
KEPT_PER_SECOND = 50
KEPT_AT_ONCE = 512


class Observed:
    """The last decisions and prompts, and the fleet over time.

    Decisions are kept up to a rate, and all of a burst; every request counts in the figures.

    kept_at_once: how many decisions of a burst are kept.
    is_closed: whether the router is being stopped, so that nothing more will come.
    """

    def __init__(self, kept_at_once: int = KEPT_AT_ONCE) -> None:
        self.is_closed = False
        self.recent = Recent()
        self.prompts = Prompts()
        self.history = History()
        self._routed: dict[str, list[int]] = {}
        self._most = self._allowance = float(kept_at_once)
        self._allowance_at = 0.0

    def decided(self, decision: Decision, prompts: Sequence[Prompt], at: float) -> None:
        """Notes a request that was routed. at: seconds since the epoch."""
        if self._may_keep(at):
            self.recent.add(decision, at)
            for prompt in prompts:
                self.prompts.add(prompt)
        if decision.prompt_tokens and decision.worker:
            counts = self._routed.get(decision.worker)
            if counts is None:
                counts = self._routed[decision.worker] = [0, 0]
            counts[0] += decision.prompt_tokens
            counts[1] += decision.certain_tokens

    def _may_keep(self, at: float) -> bool:
        passed = max(0.0, at - self._allowance_at)
        self._allowance_at = at
        self._allowance = min(self._most, self._allowance + KEPT_PER_SECOND * passed)
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    def sample(self, at: float, fills: Mapping[str, tuple[int, int]]) -> None:
        """Ends a step of the history. fills: requests in flight and blocks, of every worker."""
        nothing = [0, 0]
        routed, self._routed = self._routed, {}
        self.history.sample(
            at, {name: Figures(*fill, *routed.get(name, nothing)) for name, fill in fills.items()}
        )
