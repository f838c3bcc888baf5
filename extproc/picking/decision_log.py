"""A sample of the decisions, each with its candidates and every term of their costs: JSON lines."""

import json
import logging
from collections.abc import Callable

from extproc.picking.decision import Decision
from extproc.picking.explain import explanation

log = logging.getLogger("kvsteer.decisions")


class DecisionLog:
    """Writes some decisions as POST /explain would show them; never anything of a prompt.

    percent: how many of a hundred decisions, by chance. chance: 0 to below 1. state: of a worker's
    feeds, by its name.
    """

    def __init__(
        self, percent: int, chance: Callable[[], float], state: Callable[[str], str]
    ) -> None:
        self._share = percent / 100
        self._chance = chance
        self._state = state

    def tell(self, decision: Decision, trace_id: str = "") -> None:
        """Writes a decision, if it is in the sample.

        trace_id: of the trace that the request belongs to, if it is traced.
        """
        if self._share and self._chance() < self._share:
            shown = explanation(decision, self._state)
            if trace_id:
                shown["trace_id"] = trace_id
            log.info("%s", json.dumps(shown, separators=(",", ":")))
