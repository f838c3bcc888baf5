from array import array
from math import inf
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.features.misses.growth import Growth
from extproc.features.misses.last_prompts import Sent
from extproc.features.misses.partition import Cause
from extproc.features.misses.sender import Sender
from extproc.features.misses.whereabouts import why_elsewhere, why_gone
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from kvstate.events import Loss
from kvstate.overlap import Overlap, Prompt

PROMPT = Prompt("m", array("I", range(100)))
LAST = Sent("w", 50.0)
DAY = 86_400.0


def gone(
    last: Sent = LAST,
    record: Holdings | None = None,
    removed: float | None = None,
    growth: Growth | None = None,
) -> tuple[Cause, str]:
    grown = {} if growth is None else {"w": growth}
    return why_gone(last, PROMPT, 32, 16, record, lambda *_: removed, grown, DAY)


def test_worker_that_is_no_longer_there_is_named() -> None:
    assert gone() == (Cause.GONE, "w is no longer among the workers")


@pytest.mark.parametrize(
    ("why", "cause", "words"),
    [
        (Loss.RESTARTED, Cause.RESTARTED, "w, 00:01:00 UTC"),
        (Loss.CLEARED, Cause.CLEARED, "w, 00:01:00 UTC"),
        (None, Cause.GONE, "w was given up as dead"),
    ],
)
def test_loss_of_a_whole_cache_is_named_with_its_time(
    why: Loss | None, cause: Cause, words: str
) -> None:
    record = Holdings("w")
    record.lose(60.0, why)
    assert gone(record=record) == (cause, words)
    record.lose(inf if why is None else 40.0, why)
    assert gone(record=record)[0] is (Cause.GONE if why is None else Cause.UNKNOWN)


def test_eviction_is_named_with_its_time_and_who_grew() -> None:
    growth = Growth()
    growth.add(Sender("m", "codex", ""), 3_000, 55.0)
    found = gone(record=Holdings("w"), removed=61.0, growth=growth)
    assert found == (
        Cause.EVICTED,
        "by w at 00:01:01 UTC; since then 3,000 new tokens came there, 100% of them from codex",
    )
    assert gone(record=Holdings("w"), removed=61.0) == (Cause.EVICTED, "by w at 00:01:01 UTC")
    idle = gone(record=Holdings("w"), removed=61.0, growth=Growth())
    assert idle == (Cause.EVICTED, "by w at 00:01:01 UTC")


def test_removal_before_the_last_turn_explains_nothing() -> None:
    found = gone(record=Holdings("w"), removed=12.0)
    assert found == (Cause.UNKNOWN, "it was removed before the last turn")


def test_prompt_whose_request_failed_was_not_stored() -> None:
    failed = replace(LAST, is_stored=False)
    assert gone(last=failed, record=Holdings("w"))[0] is Cause.NOT_STORED
    assert gone(record=Holdings("w")) == (Cause.UNKNOWN, "")


def decided(**fields: Any) -> Decision:
    """A decision between the workers a and b, of which a holds a half."""
    loads = fields.pop("loads", {})
    snapshot = Snapshot(
        workers=[Candidate(name, f"{name}:1") for name in "ab"],
        overlaps=[{"a": Overlap(16, (3, 0, 0, 0))}],
        load=lambda endpoint, _: loads.get(endpoint, Load()),
        policy="cost",
        turn=0,
        **fields,
    )
    return decide(PLAIN_REQUEST, Query("m", [PROMPT]), snapshot, 0.0, Random(0))


def test_reason_for_another_worker_is_that_of_the_decision() -> None:
    assert why_elsewhere(decided(), "z", decided().worker) == "z is no longer among the workers"
    drained = decided(unfit={"a:1": "draining"})
    assert (drained.worker, why_elsewhere(drained, "a", "b")) == ("b", "a was left out: draining")
    busy = decided(loads={"a:1": Load(backlog_tokens=50_000.0)})
    assert why_elsewhere(busy, "a", "b").startswith("a had more to do: a cost of 50,")
    assert why_elsewhere(busy, "a", "b").endswith(" at b")
    assert why_elsewhere(replace(busy, worker=""), "a", "") == ""
    costs = replace(busy.basis, costs=[None, 1.0])
    assert why_elsewhere(replace(busy, basis=costs), "a", "b") == "a was not compared"
    assert why_elsewhere(busy, "a", "c") == "the proxy sent it to c; the pick was b"
