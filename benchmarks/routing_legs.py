"""When to compute prompts on another worker: the router's decision, compared with fixed rules.

It uses the same engines in simulated time (kvtools/whatif), and the router's own
decide_legs() and books.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import msgspec
from measure import Figure, Goal, Row
from routing_cells import CACHE_TOKENS
from routing_compare import interval
from routing_workloads import (
    Workload,
    long_prompts,
    mixed,
    multi_turn,
    short_prompts,
)

from extproc.config.schema import Config, Model
from extproc.config.sections import BOTH, DECODE, HEADER, MIRROR, OFFLOADING, PREFILL, SGLANG
from extproc.config.sections import Disaggregation as Rules
from extproc.disaggregation.disaggregator import Disaggregator
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.candidates.pins import NO_CHOICE, RankChoice
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.decision import Decision, Split
from extproc.routing.health.upstreams import Upstreams
from extproc.routing.inputs.query import Query
from extproc.routing.ledger import Ledger
from extproc.routing.load.endpoint_load import Ticket
from extproc.routing.load.loads import Loads
from kvstate.overlap import Overlap, Prompt
from kvtools.whatif.engines import BLOCK_TOKENS, ModelledFleet, ModelledSpeed, Request
from kvtools.whatif.routers import (
    LOOK_SECONDS,
    MAX_AHEAD,
    Tokens,
    View,
    homes_of_blocks,
    last_block,
    tokens_sent,
)

SEEDS = tuple(range(1000, 1010))

# Limits for a request to count: seconds until its first token, and between two tokens of its
# answer, on average.
FIRST_TOKEN_SECONDS = 3.0
INTER_TOKEN_SECONDS = 0.025

WORKERS = 8
SPLIT_ROLES = (PREFILL,) * 4 + (DECODE,) * 4
DELAY_SECONDS = 0.02


class Cell(NamedTuple):
    """One case. transfer_rate: the configured tokens per second from one worker to another."""

    name: str
    workload: Workload
    transfer_rate: int = 100_000


def _mixed(scale: float, seconds: float) -> Workload:
    return mixed(
        long_prompts(2 * scale, seconds),
        short_prompts(10 * scale, seconds),
        multi_turn(2 * scale, seconds),
    )


CELLS = (
    Cell("long prompts, 3/s", long_prompts(3, 90)),
    Cell("long prompts, 6/s", long_prompts(6, 60)),
    Cell("short prompts, 20/s", short_prompts(20, 45)),
    Cell("short prompts, 40/s", short_prompts(40, 30)),
    Cell("multi-turn, 8 chats/s", multi_turn(8, 40)),
    Cell("multi-turn, 14 chats/s", multi_turn(14, 30)),
    Cell("mixed, light", _mixed(1, 60)),
    Cell("mixed, busy", _mixed(1.75, 45)),
    Cell("mixed, saturated", _mixed(2.5, 30)),
    Cell("mixed, slow transfers", _mixed(1.75, 45), transfer_rate=8_000),
)

QUICK_CELLS = tuple(
    cell for cell in CELLS if cell.name in ("long prompts, 6/s", "mixed, saturated")
)


class Contestant(NamedTuple):
    """A way to use eight workers.

    is_split: whether four of them compute prompts for the other four. always: whether every prompt
    is computed elsewhere; from_tokens: whether this is so if the answering worker lacks at least
    this many tokens, whatever it costs. None: as the router decides.
    """

    name: str
    is_split: bool = True
    always: bool = False
    from_tokens: int | None = None

    def rules(self, cell: Cell) -> Rules:
        """The router's configuration."""
        rate = cell.transfer_rate
        if self.always or self.from_tokens is not None:  # SGLang computes every one elsewhere
            return Rules(MIRROR, SGLANG, transfer_tokens_per_second=rate)
        return Rules(HEADER, OFFLOADING, transfer_tokens_per_second=rate)


OURS = "4+4, as the router decides"
PLAIN = "8 plain workers"
FIXED = (
    Contestant("4+4, always", always=True),
    # llm-d's prefix-based decider, and Dynamo's bound of the effective input length
    Contestant("4+4, from 512 uncached tokens on", from_tokens=512),
    Contestant("4+4, from 2,048 uncached tokens on", from_tokens=2_048),
)
CONTESTANTS = (Contestant(OURS), *FIXED, Contestant(PLAIN, is_split=False))


class Result(NamedTuple):
    """The results of one run.

    goodput: requests per second within both limits. within: their share. ttft_p90, between_p90:
    seconds. split: the share of requests with two legs. hit_rate: that of cached prompt tokens.
    """

    goodput: float
    within: float
    ttft_p90: float
    between_p90: float
    split: float
    hit_rate: float


class _Workers:
    """The workers, in the form that `Ledger` needs."""

    def __init__(self, roles: Sequence[str]) -> None:
        self.upstreams = Upstreams()
        self._holdings = {str(number): Holdings(str(number)) for number in range(len(roles))}
        for name in self._holdings:
            self.upstreams.enter(name)
        self.loads = Loads(self.upstreams.loads, learns=True)
        self.has_roles = set(roles) != {BOTH}

    def draining(self) -> set[str]:
        return set()

    def holdings(self, name: str) -> Holdings:
        return self._holdings[name]

    def endpoint(self, name: str) -> str:
        return name

    def block_size(self, _: str) -> int:
        return BLOCK_TOKENS

    def ranks(self, _: str) -> int:
        return 1

    def rank_choice(self, _: str, __: str, *, writes_body: bool) -> RankChoice:  # noqa: ARG002 - a view's
        return NO_CHOICE


class _Router:
    """The router's books and decisions for one fleet."""

    def __init__(
        self,
        cell: Cell,
        contestant: Contestant,
        fleet: ModelledFleet,
        seed: int,
    ) -> None:
        roles = SPLIT_ROLES if contestant.is_split else (BOTH,) * WORKERS
        self._from_tokens = contestant.from_tokens
        self._view = View(fleet)
        self._workers = _Workers(roles)
        self._candidates = [Candidate(str(n), str(n), role=role) for n, role in enumerate(roles)]
        config = Config(models=(Model("m"),), disaggregation=contestant.rules(cell))
        self._placing = Ledger(config, 1, self._workers)
        self._placing.homes = homes_of_blocks(BLOCK_TOKENS)
        self._placing.claims = tokens_sent()
        self._legs = Disaggregator(config, self._placing, self._workers.upstreams)
        self._rng = Random(seed + 77)
        self._looked_at = 0.0
        self._open: dict[int, Ticket] = {}
        self.splits = 0

    def pick(self, request: Request, now: float) -> int:
        """Returns the answering engine, and notes in the request which one computes its prompt."""
        self._look_until(now)
        self._view.update(now)
        tokens = Tokens(request.tokens, request.blocks)
        prompt = Prompt("m", tokens)  # type: ignore[arg-type]
        query = Query("m", [prompt])
        held = [self._view.overlaps(request.blocks) if len(request.blocks) > 1 else {}]
        snapshot = self._placing.snapshot(
            PLAIN_REQUEST, query, self._candidates, held, lambda _: "live", now
        )
        roles = self._workers.has_roles
        decision = self._legs.decide(
            PLAIN_REQUEST, query, snapshot, now, self._rng, has_roles=roles
        )
        decision = self._by_length(decision)
        computes = decision.prefill or decision
        is_told = not self._view.holds(int(computes.worker), last_block(request.blocks))
        ticket = self._legs.book(decision, now, prompt if is_told else None)
        assert ticket is not None
        self._open[id(request)] = ticket
        if decision.prefill is not None:
            request.prefill = int(decision.prefill.worker)
            self.splits += 1
        return int(decision.worker)

    def _by_length(self, decision: Decision) -> Decision:
        """Lets the answering worker compute a short prompt, if a fixed rule says so."""
        least = self._from_tokens
        if least is None or decision.uncached_tokens >= least:
            return decision
        return msgspec.structs.replace(decision, split=Split(None, "short"))

    def over(self, request: Request, now: float) -> None:
        """Notes that the answer is complete."""
        self._look_until(now)
        ticket = self._open.pop(id(request))
        self._legs.release(ticket, now)
        self._placing.release(ticket, now)

    def _look_until(self, now: float) -> None:
        """Checks which prompts are computed, at each due time until now."""
        loads = self._workers.loads
        while self._looked_at + LOOK_SECONDS <= now:
            self._looked_at += LOOK_SECONDS
            self._view.update(self._looked_at)
            for name, state in self._workers.upstreams.loads.items():
                for ticket in list(state.speed.waiting)[:MAX_AHEAD]:
                    if ticket.prompt is not None:
                        self._look(int(name), ticket)
                loads.look(name, self._looked_at)

    def _look(self, number: int, ticket: Ticket) -> None:
        assert ticket.prompt is not None
        tokens: Tokens = ticket.prompt.tokens  # type: ignore[assignment]
        is_first = ticket is next(iter(ticket.load.speed.waiting), None)
        if not ticket.is_sure and not is_first:
            return
        if self._view.holds(number, last_block(tokens.blocks)):
            self._workers.loads.note_computed(ticket, self._looked_at)
        elif not ticket.is_sure:
            held = self._view.overlaps(tokens.blocks).get(str(number), Overlap(1, (0, 0, 0, 0)))
            self._workers.loads.revise(ticket, tokens.count - held.certain_tokens)


def run(cell: Cell, contestant: Contestant, seed: int) -> Result:
    """Serves the arrivals of a cell and seed."""
    requests = cell.workload(Random(seed))
    speeds = [ModelledSpeed()] * WORKERS
    blocks = CACHE_TOKENS // BLOCK_TOKENS
    fleet = ModelledFleet(speeds, blocks, DELAY_SECONDS, transfer_rate=cell.transfer_rate)
    router = _Router(cell, contestant, fleet, seed)
    fleet.run(requests, router.pick, router.over)
    waits = sorted(one.first_token_at - one.at for one in requests)
    between = sorted((one.done_at - one.first_token_at) / one.answer_tokens for one in requests)
    good = sum(1 for one in requests if _is_within(one))
    return Result(
        goodput=good / (requests[-1].at - requests[0].at),
        within=good / len(requests),
        ttft_p90=waits[int(0.9 * len(waits))],
        between_p90=between[int(0.9 * len(between))],
        split=router.splits / len(requests),
        hit_rate=sum(one.cached for one in requests) / sum(one.tokens for one in requests),
    )


def _is_within(one: Request) -> bool:
    between = (one.done_at - one.first_token_at) / one.answer_tokens
    return one.first_token_at - one.at <= FIRST_TOKEN_SECONDS and between <= INTER_TOKEN_SECONDS


# The results of one cell: by contestant, one for each seed.
Results = Mapping[str, Sequence[Result]]

NOT_WORSE = Goal(1.0, ">= 1, or the interval has 1", at_least=True)


@dataclass(frozen=True, slots=True)
class _PairedRow(Row):
    """A row whose goal is met unless ours is significantly worse."""

    @property
    def met(self) -> bool | None:
        """Whether the upper end of the interval of the ratio reaches the goal."""
        if self.goal is None or self.ratio is None:
            return None
        return _interval(self.ratio)[1] >= self.goal.limit


def rows(cell: str, results: Results) -> list[Row]:
    """Returns the rows of goodput relative to the best fixed rule, and to plain workers."""
    ours = _goodput(results[OURS])
    best = max((one.name for one in FIXED), key=lambda name: _mean(_goodput(results[name])))
    return [
        _PairedRow(f"{cell}: goodput / that of {best}", ours, _goodput(results[best]), NOT_WORSE),
        _PairedRow(f"{cell}: goodput / that of {PLAIN}", ours, _goodput(results[PLAIN])),
    ]


def summary(cell: str, results: Results) -> str:
    """Returns all measures of all contestants in one cell, as means over the seeds."""
    lines = [f"{cell}\n  {'':36}good/s  within  TTFT p90  between p90  split   hit  goodput / ours"]
    for name, each in results.items():
        means = [statistics.fmean(column) for column in zip(*each, strict=True)]
        ratio = _goodput(each).over(_goodput(results[OURS]))
        low, high = _interval(ratio)
        goodput, within, ttft, between, split, hit = means
        lines.append(
            f"  {name:36}{goodput:6.2f}{within:8.2f}{ttft:10.2f}{1000 * between:10.1f} ms"
            f"{split:7.2f}{hit:6.2f}  {_mean(ratio):.2f} ({low:.2f}-{high:.2f})"
        )
    return "\n".join(lines)


def _goodput(results: Sequence[Result]) -> Figure:
    return Figure([max(1e-3, one.goodput) for one in results])


def _interval(ratio: Figure) -> tuple[float, float]:
    if len(set(ratio.values)) == 1:
        return ratio.values[0], ratio.values[0]
    return interval(ratio.values)


def _mean(figure: Figure) -> float:
    return math.exp(statistics.fmean(map(math.log, figure.values)))
