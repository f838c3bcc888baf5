"""The recorder, as a feature: it gets requests as they begin and as they end."""

from collections.abc import Sequence

import msgspec
from prometheus_client.registry import Collector

from extproc.config.sections import RecorderSettings
from extproc.features.feature import Feature
from extproc.features.recording.recorder import Recorder, RecorderCollector
from extproc.observing.outcomes import Outcome
from extproc.requests.request import RoutingRequest
from extproc.requests.tenant_salt import Tenant
from extproc.requests.trusted_headers import TrustedHeaders
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query


class Recording(Feature):
    """Has requests recorded, and names their tenants where no salts do.

    are_salted: whether requests have tenants already, since these are kept apart.
    """

    def __init__(self, recorder: Recorder, rules: RecorderSettings, *, are_salted: bool) -> None:
        self._recorder = recorder
        name = rules.tenant_header
        self.headers = () if name is None or are_salted else (name.lower(),)

    def describe(self, request: RoutingRequest, named: TrustedHeaders) -> RoutingRequest:
        """Returns a request with the tenant that exactly one value of the header names."""
        for header in self.headers:
            values = {*named.get(header, ())}
            name = values.pop() if len(values) == 1 else b""
            request = msgspec.structs.replace(request, tenant=Tenant(name))
        return request

    def begin(self, request: RoutingRequest, query: Query, decision: Decision, now: float) -> None:
        """Queues a request as soon as its worker is decided."""
        self._recorder.note_decision(decision, query.prompts, request.head.session)

    def note_end(
        self, decision: Decision, outcome: Outcome | None, *, is_booked: bool, is_sent: bool
    ) -> None:
        """Has a request written that was placed; another one counts as failed."""
        if is_sent:
            self._recorder.end(decision, outcome)
        else:
            self._recorder.note_drop(decision)

    def collectors(self) -> Sequence[Collector]:
        """Returns what shows how many requests were recorded."""
        return (RecorderCollector(self._recorder),)
