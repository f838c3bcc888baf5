"""Decisions for the admin server's tests, made as the router makes them."""

from array import array
from collections.abc import Mapping, Sequence
from random import Random

from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from kvstate.overlap import Overlap, Prompt

NAMES = ("a:1", "b:1")


def prompt(tokens: Sequence[int], model: str = "m", salt: str | None = None) -> Prompt:
    return Prompt(model, array("I", tokens), None, salt)


def decided(
    held: Mapping[str, Overlap] | None = None,
    tokens: int = 32,
    names: Sequence[str] = NAMES,
) -> Decision:
    """A decision among workers of these names; held: what they hold, by name."""
    workers = [Candidate(name, name, "") for name in names]
    snapshot = Snapshot(workers, [held or {}], lambda *_: Load(), "cost", 0)
    return decide(PLAIN_REQUEST, Query("m", [prompt(range(tokens))]), snapshot, 0.0, Random(0))
