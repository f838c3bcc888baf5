from extproc.picking.decision import Snapshot
from extproc.picking.load import Load


def test_workers_whose_feeds_nobody_told_of_are_taken_for_live() -> None:
    snapshot = Snapshot([], [{}], lambda *_: Load(), "cost", 0)
    assert snapshot.state("w") == "live"
