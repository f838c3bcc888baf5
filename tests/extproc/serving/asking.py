"""Exchanges of tests that decide on every message."""

from typing import Any

from extproc.features.feature import AskForTime
from extproc.requests.request import Head, RoutingRequest
from extproc.serving.router import no_more_time


class Asking:
    """Lets `receive` answer each message in the two steps that a server takes.

    ask_for_time: of the message that is answered. is_held, more_time: as an exchange's.
    """

    message: Any = None
    ask_for_time: AskForTime = staticmethod(no_more_time)
    is_held = False

    def step(self, message: Any) -> RoutingRequest:
        """Takes a message, which `decide` then answers."""
        self.message = message
        return RoutingRequest(Head("", "", None), None)

    def more_time(self, seconds: float) -> list[bytes] | None:
        """Returns what asks for more time; None if nobody waits."""
        return None

    async def decide(self, _: RoutingRequest, ask_for_time: AskForTime) -> Any:
        """Returns the answers to the message."""
        self.ask_for_time = ask_for_time
        return await self.receive(self.message)

    async def receive(self, message: Any) -> Any:
        """Returns the answers to a message."""
        raise NotImplementedError
