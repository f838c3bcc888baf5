"""A feature: an optional part of routing, as one object with a few hooks.

The router asks each enabled feature at these points of a request's way, in the order of
`extproc.serving.enabled_features`:

    hook          when                                   what it may do
    terms         before the decision                    add summands to the cost of workers
    dress         after it                               change the decision
    begin         before a steered request is booked     note what begins with it
    note_outcome  after it, if responses are accounted   learn from what the engine reported
    collectors    once, at the start                     show metrics

A feature that is off is not in the list, and costs nothing. The decision knows terms, charges and
fetches (`extproc.routing.cost`), and imports no feature. An error in a hook is logged: before the
decision, the request is routed by load; after it, the hook is left out.
"""

from collections.abc import Iterable, Sequence

from prometheus_client.registry import Collector

from extproc.observing.outcomes import Outcome
from extproc.requests.request import RoutingRequest
from extproc.routing.cost.term import Term
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot


class Feature:
    """The hooks, none of which does anything; times are seconds of the loads' clock."""

    def terms(
        self, request: RoutingRequest, query: Query, snapshot: Snapshot, now: float
    ) -> Sequence[Term]:
        """Returns what is added to the costs of workers for a request."""
        return ()

    def dress(self, decision: Decision) -> Decision:
        """Returns a decision as it is to be carried out."""
        return decision

    def begin(self, decision: Decision, query: Query, now: float) -> None:
        """Notes that a steered request is about to be booked where it was decided."""

    def note_outcome(self, outcome: Outcome, now: float) -> None:
        """Notes what the engine reported of a request."""

    def collectors(self) -> Iterable[Collector]:
        """Returns what shows its metrics."""
        return ()
