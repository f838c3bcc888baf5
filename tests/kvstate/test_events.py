import pytest

from kvstate.events import AllCleared, BlocksRemoved, EventBatch


def test_batch_clears_if_any_of_its_events_does() -> None:
    assert EventBatch(1.0, [BlocksRemoved([1]), AllCleared()]).clears
    assert not EventBatch(1.0, [BlocksRemoved([1])]).clears
    assert not EventBatch(1.0, []).clears


def test_events_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        BlocksRemoved([1]).medium = "CPU"  # type: ignore[misc]
