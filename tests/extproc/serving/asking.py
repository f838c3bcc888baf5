"""Exchanges of tests that decide on every message."""

from typing import Any

from extproc.requests.request import Head, RoutingRequest


class Asking:
    """Lets `receive` answer each message in the two steps that a server takes."""

    message: Any = None

    def step(self, message: Any) -> RoutingRequest:
        """Takes a message, which `decide` then answers."""
        self.message = message
        return RoutingRequest(Head("", "", None), None)

    async def decide(self, _: RoutingRequest) -> Any:
        """Returns the answers to the message."""
        return await self.receive(self.message)

    async def receive(self, message: Any) -> Any:
        """Returns the answers to a message."""
        raise NotImplementedError
