import pytest

from kvstate.events import Batch
from kvstate.feeds import feed as held_module
from kvstate.feeds.feed import Held


def batch(number: int, size_bytes: int = 0) -> Batch:
    return Batch(number, b"", 0.0, size_bytes)


def test_batches_are_taken_in_their_order() -> None:
    held: Held = Held()
    assert held.first_sequence is None
    held.extend([batch(3), batch(4)])
    assert len(held) == 2
    assert held.take_all() == [batch(3), batch(4)]
    assert len(held) == 0


def test_the_oldest_goes_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_module, "MAX_HELD_BATCHES", 2)
    held: Held = Held()
    held.extend(map(batch, range(5)))
    assert [each.sequence for each in held.take_all()] == [3, 4]


def test_the_oldest_goes_when_they_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_module, "MAX_HELD_BYTES", 100)
    held: Held = Held()
    held.extend(batch(number, 40) for number in range(4))
    assert [each.sequence for each in held.take_all()] == [2, 3]
    held.extend(batch(number, 40) for number in range(2))
    assert len(held) == 2  # batches that were taken use no room any more


def test_the_newest_stays_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_module, "MAX_HELD_BYTES", 100)
    held: Held = Held()
    held.extend([batch(0, 10), batch(1, 500)])
    assert held.first_sequence == 1
