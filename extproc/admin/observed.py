"""What the admin server remembers of the requests that were routed; bounded, and cheap to keep."""

from collections.abc import Mapping, Sequence

from extproc.admin.history import Figures, History
from extproc.admin.prefixes import Prompts
from extproc.admin.recent import Recent
from extproc.picking.decision import Decision
from kvstate.overlap import Prompt


class Observed:
    """The last decisions and prompts, and the fleet over time.

    is_closed: whether the router is being stopped, so that nothing more will come.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.recent = Recent()
        self.prompts = Prompts()
        self.history = History()
        self._routed: dict[str, list[int]] = {}

    def decided(self, decision: Decision, prompts: Sequence[Prompt], at: float) -> None:
        """Notes a request that was routed. at: seconds since the epoch."""
        self.recent.add(decision, at)
        for prompt in prompts:
            self.prompts.add(prompt)
        if decision.prompt_tokens and decision.worker:
            counts = self._routed.setdefault(decision.worker, [0, 0])
            counts[0] += decision.prompt_tokens
            counts[1] += decision.certain_tokens

    def sample(self, at: float, fills: Mapping[str, tuple[int, int]]) -> None:
        """Ends a step of the history. fills: requests in flight and blocks, of every worker."""
        nothing = [0, 0]
        routed, self._routed = self._routed, {}
        self.history.sample(
            at, {name: Figures(*fill, *routed.get(name, nothing)) for name, fill in fills.items()}
        )
