from array import array

from extproc.routing.inputs.query import Query, Variant
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
