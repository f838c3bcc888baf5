"""`kvsteer`, with a router that asks for more time for each request, and holds it for so long.

python -m tests.system.processes.holding_router SECONDS ARGUMENTS
"""

import asyncio
import sys

from extproc.__main__ import main
from extproc.features.feature import AskForTime
from extproc.requests.request import RoutingRequest
from extproc.serving.router import Routed, Router, no_more_time

ASKED_SECONDS = 60.0

_route = Router.route


class Holding:
    """Has a kind of router hold requests. granted: whether the proxy waits, for each request.

    picks: the workers that were named. given_up: how many requests ended while they were held.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.granted: list[bool] = []
        self.picks: list[str] = []
        self.held = self.given_up = 0

    async def route(
        self,
        router: Router,
        request: RoutingRequest,
        traceparent: str = "",
        ask_for_time: AskForTime = no_more_time,
    ) -> Routed:
        """Routes a request after it was held."""
        self.granted.append(ask_for_time(ASKED_SECONDS))
        self.held += 1
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.held -= 1
        decision, ticket = await _route(router, request, traceparent)
        self.picks += decision.pick[:1]
        return decision, ticket


if __name__ == "__main__":
    holding = Holding(float(sys.argv[1]))

    async def route(
        self: Router,
        request: RoutingRequest,
        traceparent: str = "",
        ask_for_time: AskForTime = no_more_time,
    ) -> Routed:
        """Does what `Router.route` does, after a wait."""
        return await holding.route(self, request, traceparent, ask_for_time)

    Router.route = route  # type: ignore[method-assign]
    sys.exit(main(sys.argv[2:]))
