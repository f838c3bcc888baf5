"""Observers: they watch requests, and cannot affect them."""

from collections.abc import Sequence
from typing import Protocol

from extproc.routing.decision import Decision
from kvstate.overlap import Prompt


class Observer(Protocol):
    """Watches requests; its errors do not affect them."""

    def note_decision(
        self, decision: Decision, prompts: Sequence[Prompt], request_id: str = ""
    ) -> None:
        """A decision was made; request_id: the request's own, "" without one."""

    def note_drop(self, decision: Decision) -> None:
        """A decision that was made takes no effect."""

    def note_server(self, decision: Decision, endpoint: str) -> None:
        """The endpoint that answered a request is known."""


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def note_decision(
        self, decision: Decision, prompts: Sequence[Prompt], request_id: str = ""
    ) -> None:
        """A decision was made; request_id: the request's own, "" without one."""
        for one in self._observers:
            one.note_decision(decision, prompts, request_id)

    def note_drop(self, decision: Decision) -> None:
        """A decision that was made takes no effect."""
        for one in self._observers:
            one.note_drop(decision)

    def note_server(self, decision: Decision, endpoint: str) -> None:
        """The endpoint that answered a request is known."""
        for one in self._observers:
            one.note_server(decision, endpoint)
