from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load


def test_snapshot_takes_feeds_of_unknown_state_for_live() -> None:
    snapshot = Snapshot([], [{}], lambda *_: Load(), "cost", 0)
    assert snapshot.state("w") == "live"
