"""Fixtures for all of the doctor's tests."""

import pytest

from extproc.commands.doctor import feed_visit


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the wait for events: where nothing is published, it is in vain."""
    monkeypatch.setattr(feed_visit, "LISTEN_SECONDS", 0.2)
