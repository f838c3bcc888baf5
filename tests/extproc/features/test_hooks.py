"""The hooks of the enabled features."""

import pytest

from extproc.features.feature import Feature
from extproc.features.hooks import NO_HOOKS, Hooks, tell
from extproc.routing.decision import Decision
from tests.extproc.routing.books import decided, ledger


class Watching(Feature):
    headers = ("x-a",)

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note_server(self, _: Decision, endpoint: str) -> None:
        self.seen.append(endpoint)


class Broken(Feature):
    def note_server(self, _: Decision, endpoint: str) -> None:
        raise RuntimeError(endpoint)


def test_hooks_are_those_of_features_that_have_them() -> None:
    hooks = Hooks([Watching(), Feature()])
    assert (len(hooks.note_server), hooks.headers) == (1, ["x-a"])
    assert not hooks.begin
    assert not NO_HOOKS.note_server


def test_hook_that_fails_is_logged_and_the_next_is_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watching = Watching()
    tell(Hooks([Broken(), watching]).note_server, decided(ledger()), "a:1")
    assert watching.seen == ["a:1"]
    assert "a feature failed" in caplog.text
