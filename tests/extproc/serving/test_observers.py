"""Several observers as one."""

from collections.abc import Sequence
from typing import Any, cast

from extproc.requests.request import NO_HEAD, Head
from extproc.routing.decision import Decision
from extproc.serving.observers import Observers
from kvstate.overlap import Prompt


class Witness:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note_decision(
        self, decision: Decision, prompts: Sequence[Prompt], _head: Head = NO_HEAD
    ) -> None:
        self.seen.append(("decided", decision, prompts))

    def note_drop(self, decision: Decision) -> None:
        self.seen.append(("dropped", decision))

    def note_server(self, decision: Decision, endpoint: str) -> None:
        self.seen.append(("served", decision, endpoint))


def test_observers_pass_everything_to_each() -> None:
    one, other = Witness(), Witness()
    decision = cast("Decision", object())
    observers = Observers(one, other)
    observers.note_decision(decision, [])
    observers.note_drop(decision)
    observers.note_server(decision, "a:1")
    expected: list[Any] = [
        ("decided", decision, []),
        ("dropped", decision),
        ("served", decision, "a:1"),
    ]
    assert one.seen == other.seen == expected
