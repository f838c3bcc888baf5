"""The decision log: a sample of the decisions, as lines of JSON."""

import json
import logging
from collections.abc import Callable
from typing import Any

from extproc.base.trace_context import trace_id_of
from extproc.requests.request import NO_HEAD, Head
from extproc.routing.decision import Decision
from extproc.routing.explain import explanation

log = logging.getLogger("kvsteer.decisions")


class DecisionLog:
    """Logs a sample of the decisions as POST /explain shows them, without any prompt text.

    percent: the percentage of decisions to log, at random. chance: returns a random number from 0
    to below 1. state: returns the state of a worker's feeds, by its name. is_on: whether any
    decision is logged.
    """

    def __init__(
        self, percent: int, chance: Callable[[], float], state: Callable[[str], str]
    ) -> None:
        self._share = percent / 100
        self.is_on = percent > 0
        self._chance = chance
        self._state = state

    def tell(self, decision: Decision, head: Head = NO_HEAD, trace_id: str = "") -> None:
        """Logs a decision if it is in the sample; head, trace_id: as in `ids_of`."""
        if self._chance() < self._share:
            shown = explanation(decision, self._state)
            ids = ids_of(head, trace_id)
            shown |= {name: one for name, one in ids.items() if one}
            log.info("%s", _DecisionLine(shown), extra={"decision": shown, **ids})


def ids_of(head: Head, trace_id: str = "") -> dict[str, str]:
    """Returns the ids of a request and of its trace, each "" if there is none.

    trace_id: of the trace that the proxy began, which counts before the client's.
    """
    return {
        "trace_id": trace_id or trace_id_of(head.traceparent),
        "request_id": head.request_id,
    }


class _DecisionLine:
    """A decision as a line of JSON, for logs of text; encoded only if it is written."""

    def __init__(self, shown: dict[str, Any]) -> None:
        self._shown = shown

    def __str__(self) -> str:
        return json.dumps(self._shown, separators=(",", ":"))
