"""The decision log: a sample of the decisions, as lines of JSON."""

import json
import logging
from collections.abc import Callable

from extproc.routing.decision import Decision
from extproc.routing.explain import explanation

log = logging.getLogger("kvsteer.decisions")


class DecisionLog:
    """Logs a sample of the decisions as POST /explain shows them, without any prompt text.

    percent: the percentage of decisions to log, at random. chance: returns a random number from 0
    to below 1. state: returns the state of a worker's feeds, by its name.
    """

    def __init__(
        self, percent: int, chance: Callable[[], float], state: Callable[[str], str]
    ) -> None:
        self._share = percent / 100
        self._chance = chance
        self._state = state

    def tell(self, decision: Decision, trace_id: str = "") -> None:
        """Logs a decision if it is in the sample.

        trace_id: the trace that the request belongs to, if it is traced.
        """
        if self._share and self._chance() < self._share:
            shown = explanation(decision, self._state)
            if trace_id:
                shown["trace_id"] = trace_id
            log.info("%s", json.dumps(shown, separators=(",", ":")))
