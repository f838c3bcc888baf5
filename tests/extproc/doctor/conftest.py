"""What holds for the doctor's tests."""

import pytest

from extproc.doctor import feed_visit


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is published, there is nothing to wait for."""
    monkeypatch.setattr(feed_visit, "LISTEN_SECONDS", 0.2)
