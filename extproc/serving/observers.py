"""Observers: they watch requests, and cannot affect them."""

from collections.abc import Sequence
from typing import Protocol

from extproc.requests.request import NO_HEAD, Head
from extproc.routing.decision import Decision
from kvstate.overlap import Prompt


class Observer(Protocol):
    """Watches requests; its errors do not affect them."""

    def note_decision(
        self, decision: Decision, prompts: Sequence[Prompt], head: Head = NO_HEAD
    ) -> None:
        """A decision was made; head: of the request."""

    def note_drop(self, decision: Decision) -> None:
        """A decision that was made takes no effect."""

    def note_server(self, decision: Decision, endpoint: str) -> None:
        """The endpoint that answered a request is known."""


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def note_decision(
        self, decision: Decision, prompts: Sequence[Prompt], head: Head = NO_HEAD
    ) -> None:
        """A decision was made; head: of the request."""
        for one in self._observers:
            one.note_decision(decision, prompts, head)

    def note_drop(self, decision: Decision) -> None:
        """A decision that was made takes no effect."""
        for one in self._observers:
            one.note_drop(decision)

    def note_server(self, decision: Decision, endpoint: str) -> None:
        """The endpoint that answered a request is known."""
        for one in self._observers:
            one.note_server(decision, endpoint)
