from kvstate.events import Batch
from kvstate.feeds.held_batches import HeldBatches


def batch(number: int, size_bytes: int = 0) -> Batch:
    return Batch(number, b"", 0.0, size_bytes)


def test_held_batches_are_taken_in_their_order() -> None:
    held = HeldBatches()
    assert held.first_sequence is None
    held.extend([batch(3), batch(4)])
    assert len(held) == 2
    assert held.take_all() == [batch(3), batch(4)]
    assert len(held) == 0


def test_held_batches_drop_the_oldest_beyond_their_number() -> None:
    held = HeldBatches(max_batches=2)
    held.extend(map(batch, range(5)))
    assert [each.sequence for each in held.take_all()] == [3, 4]


def test_held_batches_drop_the_oldest_beyond_their_bytes() -> None:
    held = HeldBatches(max_bytes=100)
    held.extend(batch(number, 40) for number in range(4))
    assert [each.sequence for each in held.take_all()] == [2, 3]
    held.extend(batch(number, 40) for number in range(2))
    assert len(held) == 2  # batches that were taken use no room any more


def test_held_batches_keep_the_newest_whatever_its_size() -> None:
    held = HeldBatches(max_bytes=100)
    held.extend([batch(0, 10), batch(1, 500)])
    assert held.first_sequence == 1
