"""A feature: an optional part of routing, as one object with a few hooks.

Each enabled feature is asked at these points of a request's way, in the order in which
`extproc.serving.enabled_features` lists them:

    hook         when                                     what it may do
    headers      once, at the start                       name the trusted headers that it reads
    describe     before the request is read               say what these headers say of it
    terms        before the decision                      add summands to the cost of workers
    dress        after it                                 change the decision
    must_wait    after that                               have the request wait, and be decided anew
    begin        before a model's call is booked          note what begins with it
    note_placed  after that, whatever was decided         count it
    extend       as the proxy is answered                 add members to the body
    write        after that                               add headers, change the body, or refuse
    note_server  once the proxy says who answered         note who
    respond      as the response begins                   add headers for the client
    note_end     at the end of a decided request          learn from what the engine reported
    note_stop    once no new request comes                end what waits, before the router stops
    collectors   once, at the start                       show metrics

A feature that is off is not in the list, and each point asks only the features that have its hook
(`extproc.features.hooks`), so what is off costs nothing. The decision knows terms, charges and
fetches (`extproc.routing.cost`), and imports no feature. An error in a hook is logged: in `terms`
and `dress`, the request is routed by load; in others, the hook is left out; in `describe` and
`write`, the stream ends, and the proxy does what its failure mode says.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from prometheus_client.registry import Collector

from extproc.observing.outcomes import Outcome
from extproc.requests.added_fields import Body
from extproc.requests.refusals import Refusal
from extproc.requests.request import RoutingRequest
from extproc.requests.trusted_headers import TrustedHeaders
from extproc.routing.cost.term import Term
from extproc.routing.decision import Decision, Verdict
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot


class Written(NamedTuple):
    """What a feature writes into a request: headers to set, and a body in the place of the last.

    body: None if it stays as it is.
    """

    headers: Sequence[tuple[str, str]] = ()
    body: Body | None = None


NOTHING_WRITTEN = Written()

# Has the proxy wait so many seconds for the decision; returns whether it does.
AskForTime = Callable[[float], bool]


class Wait(ABC):
    """The wait of one request, which may take minutes."""

    @abstractmethod
    async def end(self, ask_for_time: AskForTime) -> bool:
        """Waits until the request is to be decided anew; returns False if it is to be refused.

        What it awaits first is `asyncio.sleep(0)`, as in `Router.route`.
        """


class Feature:
    """The hooks, none of which does anything; times are seconds of the loads' clock.

    headers: the names of the trusted headers that it reads, in lower case. wants_named: whether
    requests are to have the values of these (`RoutingRequest.named`), as for what only `begin`
    reads.
    """

    headers: Sequence[str] = ()
    wants_named = False

    def describe(self, request: RoutingRequest, named: TrustedHeaders) -> RoutingRequest:
        """Returns a request with what the trusted headers say of it; without side effects."""
        return request

    def terms(
        self, request: RoutingRequest, query: Query, snapshot: Snapshot, now: float
    ) -> Sequence[Term]:
        """Returns what is added to the costs of workers for a request; without side effects."""
        return ()

    def dress(self, decision: Decision, request: RoutingRequest, query: Query) -> Decision:
        """Returns a decision as it is to be carried out; without side effects."""
        return decision

    def must_wait(self, request: RoutingRequest, decision: Decision, now: float) -> Wait | None:
        """Returns the wait of a request that must not be booked yet, None if it may be."""
        return None

    def begin(self, request: RoutingRequest, query: Query, decision: Decision, now: float) -> None:
        """Notes that a call of a model is about to be booked where it was decided, if anywhere."""

    def note_placed(self, decision: Decision, verdict: Verdict, *, is_booked: bool) -> None:
        """Notes that a request was decided.

        verdict: what becomes of it; the decision's, unless only the proxy may choose. is_booked:
        whether it is a worker's load now.
        """

    def extend(self, decision: Decision, path: str) -> bytes:
        """Returns members to add at the end of the body of a request, b"" for none.

        JSON, without the braces around it. In dialect B as well, in which nothing else of a body is
        changed: whatever the engine does with it must be the same without.
        """
        return b""

    def write(self, decision: Decision, path: str, body: Body | None) -> Written | Refusal:
        """Returns what is written into a request that goes where it was decided, or its refusal.

        body: as it is so far; None if it must not be changed.
        """
        return NOTHING_WRITTEN

    def note_server(self, decision: Decision, endpoint: str) -> None:
        """Notes which endpoint answered a request."""

    def respond(self, decision: Decision) -> Sequence[tuple[str, str]]:
        """Returns headers that the client gets with its response; the proxy must send it here."""
        return ()

    def note_end(
        self, decision: Decision, outcome: Outcome | None, *, is_booked: bool, is_sent: bool
    ) -> None:
        """Notes that a request that was decided is over.

        outcome: of its response, None if that is not known. is_booked: whether it was a worker's
        load. is_sent: whether the proxy was to send it on; if not, it was refused, or it failed.
        """

    def note_stop(self, seconds: float) -> None:
        """Notes that no new request comes, and that those under way have so many seconds left."""

    def collectors(self) -> Iterable[Collector]:
        """Returns what shows its metrics."""
        return ()
