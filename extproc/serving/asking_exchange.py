"""An exchange whose request says which models' fleets hold its prompt: `policy.warm_models`.

The other models are asked before the request is decided, so nothing is booked while it waits for
them. Where no model is to be named, exchanges are not of this kind, and know nothing of it.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from extproc.config.schema import Config
from extproc.features.feature import AskForTime
from extproc.observing.metrics import Metrics
from extproc.requests.refusals import Refusal
from extproc.requests.request import Models, RoutingRequest
from extproc.serving.exchange import Exchange, Service
from extproc.serving.other_models import OtherModels
from extproc.serving.placed_request import PlacedRequest
from extproc.serving.router import Router, no_more_time
from extproc.serving.shared_by_streams import SharedByStreams
from extproc.serving.stream_answers import Answers, PickAnswer

NO_SHARES: Mapping[str, float] = MappingProxyType({})


class AskingExchange(Exchange):
    """One stream, about whose request other models are asked. others: asks them."""

    def __init__(self, service: SharedByStreams, others: OtherModels, traceparent: str) -> None:
        super().__init__(service, traceparent)
        self._others = others
        self._shares = NO_SHARES

    async def decide(
        self, request: RoutingRequest, ask_for_time: AskForTime = no_more_time
    ) -> Answers:
        """Does what `Exchange.decide` does, after the other models are asked."""
        self._shares = await self._others.shares(request, self._named)
        return await super().decide(request, ask_for_time)

    def _pick_answer(
        self, placed: PlacedRequest, request: RoutingRequest, *, is_changed: bool
    ) -> PickAnswer | Refusal:
        """Returns the answer with the header added, or the refusal."""
        answer = super()._pick_answer(placed, request, is_changed=is_changed)
        if isinstance(answer, Refusal):
            return answer
        named = self._others.header(placed.decision, self._shares)
        return replace(answer, header_values=(*answer.header_values, *named))


class AskingService(Service):
    """Opens such an exchange for each stream."""

    def __init__(self, config: Config, router: Router, metrics: Metrics) -> None:
        super().__init__(config, router, metrics)
        asked = config.policy.warm_models
        self._others = OtherModels(router, Models(config.models), asked)

    def open(self, traceparent: str = "") -> Exchange:
        """Returns the exchange of a new stream; see `Service.open`."""
        return AskingExchange(self, self._others, traceparent)


def service_of(config: Config, router: Router, metrics: Metrics) -> Service:
    """Returns the service that a configuration makes."""
    kind = AskingService if config.policy.warm_models else Service
    return kind(config, router, metrics)
