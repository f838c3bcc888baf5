"""The books of one router for three workers, and what they depend on."""

from array import array
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from extproc.config.schema import Config, Model, Policy
from extproc.requests.request import PLAIN_REQUEST, RoutingRequest
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.candidates.pins import Pin, RankChoice
from extproc.routing.claims.claim_table import Claim, Holdings
from extproc.routing.claims.homes import Turn
from extproc.routing.claims.marks import Marks
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.health.evidence import Judge
from extproc.routing.health.upstreams import Upstream, Upstreams
from extproc.routing.inputs.query import Query
from extproc.routing.ledger import Ledger
from extproc.routing.load.loads import Loads
from kvstate.overlap import Overlap, Prompt

WORKERS = [Candidate(name, f"{name}:1") for name in "abc"]
QUERY = Query("m", [Prompt("m", array("I", range(1000)))])
NOTHING: Mapping[str, Overlap] = {}


class Fleet:
    """Three workers, and what picks depend on."""

    def __init__(self, config: Config, ranks: int = 0) -> None:
        self.upstreams = Upstreams()
        for worker in WORKERS:
            self.upstreams.enter(worker.endpoint)
        rate = config.policy.cost.prefill_tokens_per_second
        self.loads = Loads(self.upstreams.loads, rate)
        self.has_roles = False
        self.drained: set[str] = set()
        self._ranks = ranks
        self._holdings = {worker.name: Holdings(worker.name) for worker in WORKERS}

    def draining(self) -> set[str]:
        return self.drained

    def holdings(self, name: str) -> Holdings:
        return self._holdings[name]

    def endpoint(self, name: str) -> str:
        return next((one.endpoint for one in WORKERS if one.name == name), "")

    def block_size(self, _: str) -> int:
        return 1

    def ranks(self, _: str) -> int:
        return self._ranks

    def rank_choice(self, _: str, __: str, *, writes_body: bool) -> RankChoice:
        return RankChoice(Pin("x-rank", in_body=True), writes_body)

    def upstream(self, endpoint: str) -> Upstream:
        found = self.upstreams.get(endpoint)
        assert found is not None
        return found

    def eject(self, endpoint: str, judge: Judge, reason: str) -> None:
        self.upstreams.eject(self.upstream(endpoint), judge, reason, 0.0)


class RecordedReports:
    """Records what other routers would be told: of claims in `lines`, and of homes."""

    secret = 77

    def __init__(self) -> None:
        self.touched: set[str] = set()
        self.lines: list[tuple[str, object]] = []
        self.homes: list[tuple[str, object]] = []
        self.marks: dict[Claim, Marks] = {}

    def begin(self, claims: Sequence[Claim], endpoint: str, uncached_tokens: float) -> None:
        self.marks.update((one, Marks(one.lengths, one.keys)) for one in claims)
        self.lines.append((f"begun at {endpoint} with {uncached_tokens:.0f}", list(claims)))

    def end(self, claim: Claim) -> None:
        self.lines.append(("ended", claim))

    def withdraw(self, claim: Claim) -> None:
        self.lines.append(("withdrawn", claim))

    def note_turn(self, turn: Turn, endpoint: str) -> None:
        self.homes.append((f"turn at {endpoint}", (turn.keys, turn.follows)))

    def note_home(self, key: int, endpoint: str) -> None:
        self.homes.append((f"home at {endpoint}", key))

    def note_not_computed(self, keys: Sequence[int], endpoint: str) -> None:
        self.homes.append((f"over at {endpoint}", tuple(keys)))


def books(config: Config, fleet: Fleet, reporter: "RecordedReports | None" = None) -> Ledger:
    """A router's books for these workers."""
    return Ledger(config, 1, fleet, reporter)


def fleet_of(one: Ledger) -> Fleet:
    fleet = one.fleet
    assert isinstance(fleet, Fleet)
    return fleet


def ledger(**policy: Any) -> Ledger:
    config = Config(models=(Model("m"),), policy=Policy(**policy))
    return books(config, Fleet(config))


def decided(
    one: Ledger,
    query: Query = QUERY,
    now: float = 0.0,
    state: str = "live",
    workers: Sequence[Candidate] = WORKERS,
    held: Mapping[str, Overlap] = NOTHING,
    *,
    names_ranks: bool = False,
    request: RoutingRequest = PLAIN_REQUEST,
) -> Decision:
    ranks = one.ranks("/v1/completions", writes_body=True) if names_ranks else None
    prompts = [held for _ in query.prompts]
    snapshot = one.snapshot(request, query, workers, prompts, lambda _: state, now, ranks)
    return decide(request, query, snapshot, now, Random(0))
