import logging

import pytest

from kvstate.errors import WireError
from kvstate.events import BatchResult
from kvstate.index.index import Index
from kvstate.index.owner import BYTES_PER_BLOCK, IndexLimits, Owner
from kvstate.steps import finished
from tests.kvstate.publishing import block, chain, payload


def sink(limit_blocks: int = 100) -> tuple[Index, Owner]:
    index = Index(12345678, IndexLimits(bytes=limit_blocks * BYTES_PER_BLOCK))
    made = index.add("w", 0, "m")
    made.trust(trusted=True)
    return index, made


def certain(index: Index) -> int:
    overlap = index.overlaps(chain(9)).get("w")
    return sum(overlap.tiers) if overlap else 0


def test_batches_fill_the_index_until_the_publisher_restarts() -> None:
    index, made = sink()
    assert finished(made.applying(payload(0, block(1), block(2, 1)))) == BatchResult()
    assert certain(index) == 2
    finished(made.forgetting())
    assert made.blocks == 0


def test_blocks_are_uncertain_without_trust_and_behind_a_hole() -> None:
    index, made = sink()
    finished(made.applying(payload(0, block(1))))
    made.trust(trusted=False)
    assert certain(index) == 0
    made.trust(trusted=True)
    finished(made.demoting())
    assert certain(index) == 0


def test_clear_and_removal_of_the_last_uncertain_block_heal() -> None:
    _, made = sink()
    finished(made.applying(payload(0, block(1))))
    finished(made.demoting())
    assert finished(made.applying(payload(1, ["BlockRemoved", [1]]))) == BatchResult(healed=True)
    assert finished(made.applying(payload(2, ["AllBlocksCleared"]))) == BatchResult(
        healed=True, clears=True
    )


def test_changing_block_sizes_are_logged_at_powers_of_two(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, made = sink()
    with caplog.at_level(logging.INFO):
        for number in range(100):
            size = 1 + number % 2
            stored = ["BlockStored", [number], None, list(range(size)), size]
            finished(made.applying(payload(number, stored, ["BlockRemoved", [number]])))
    assert caplog.messages[:2] == ["w: block size learned: 1", "w: block size learned: 2"]
    assert len(caplog.messages) == 7  # of the 1st, 2nd, 4th ... 64th


def test_batch_with_losses_reports_what_it_missed() -> None:
    _, made = sink(limit_blocks=1)
    lost = finished(made.applying(payload(0, ["BlockRemoved", "not a hash"])))
    assert lost.missed == "an event that may have been a removal could not be read"
    assert lost.faults == ("bad_hash",)
    full = finished(made.applying(payload(1, block(1), block(2, 1))))
    assert full.missed == "it holds more blocks than the index keeps for one rank"


def test_indistinguishable_groups_are_reported_as_missed() -> None:
    _, made = sink()
    two = [["BlockStored", [n], None, [n], 1, None, "GPU", None, None, n] for n in (1, 2)]
    taken = finished(made.applying(payload(0, *two)))
    assert taken.missed == "its attention groups cannot be distinguished"


def test_learned_block_size_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvsteer.feed")
    _, made = sink()
    finished(made.applying(payload(0, block(1))))
    finished(made.applying(payload(1, block(2))))
    assert caplog.messages == ["w: block size learned: 1"]


def test_invalid_payload_changes_nothing() -> None:
    _, made = sink()
    with pytest.raises(WireError):
        finished(made.applying(b"\xc1"))
    assert made.blocks == 0
