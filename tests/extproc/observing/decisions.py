"""Decisions as the router makes them, for tests of the outcomes of their requests."""

from array import array
from random import Random

from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from kvstate.overlap import Overlap, Prompt

WORKERS = (Candidate("first", "10.0.0.1:1"), Candidate("second", "10.0.0.2:1"))


def overlap(blocks: int) -> Overlap:
    """An overlap of this many certain blocks of 16 tokens on a device."""
    return Overlap(16, (blocks, 0, 0, 0), 0)


def decided(prompts: int = 1, *, first: int = 4, second: int = 1) -> Decision:
    """A decision for worker `first` on prompts of 100 tokens.

    first, second: how many blocks each worker holds of each prompt.
    """
    held = {"first": overlap(first), "second": overlap(second)}
    asked = [Prompt("m", array("I", range(100))) for _ in range(prompts)]
    snapshot = Snapshot(
        workers=WORKERS,
        overlaps=[held for _ in asked],
        load=lambda *_: Load(),
        policy="cost",
        turn=0,
    )
    return decide(PLAIN_REQUEST, Query("m", asked), snapshot, 0.0, Random(0))
