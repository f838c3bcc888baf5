from array import array

from extproc.routing.claims.live_contexts import Occupancy
from extproc.routing.inputs.query import Query, Variant
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from kvstate.overlap import Prompt

OWN, OTHER = Prompt("m", array("I", [1])), Prompt("m", array("I", [2]))
NEW = Variant(frozenset({"new"}), [OTHER], forms=4)
OLD = Variant(frozenset({"old", "oldest"}), [], forms=0)


def test_query_is_told_to_each_worker_as_its_engine_reads_it() -> None:
    query = Query("m", [OWN], forms=1, variants=[NEW, OLD])
    assert query.query_for("another") is query
    told = {name: query.query_for(name) for name in ("new", "old", "oldest")}
    assert {name: (list(one.prompts), one.forms) for name, one in told.items()} == {
        "new": ([OTHER], 4),
        "old": ([], 0),
        "oldest": ([], 0),
    }


def test_snapshot_of_no_counts_has_no_live_contexts() -> None:
    snapshot = Snapshot([], [], lambda _, __: Load(), "cost", 0)
    assert snapshot.occupancy("a worker", 0.0) == Occupancy()
