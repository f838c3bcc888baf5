"""The decision: pure, and the same for a request that is routed and one that is explained."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from extproc.picking.claims import NO_CLAIMS, Claims, claims_of
from extproc.picking.eligibility import ANY, Demand, Worker, why_excluded
from extproc.picking.load import Load
from extproc.picking.marks import Marks
from extproc.picking.pick import MAX_PICKS, Chance, affinity_of
from extproc.picking.policies import LOOK_AT_OVERLAP, POLICIES, Columns
from extproc.picking.rules import Rules
from extproc.picking.sent import Sent
from kvstate.overlap import Overlap, Prompt

__all__ = ["Decision", "Query", "Snapshot", "Verdict", "Worker", "decide"]

# Of a text whose tokens are not known, so many bytes are taken for one.
TEXT_BYTES_PER_TOKEN = 4

# More of a text is not looked at: long bodies mostly carry media, which are few tokens.
MAX_TEXT_BYTES = 128 * 1024

_IDLE = Load()
OVER_LIMIT = "over its limit of requests"


class Verdict(Enum):
    """What is to become of a request.

    STEER: it goes to the pick. NO_OVERRIDE: nothing is said, the proxy chooses. UNAVAILABLE: 503.
    SHED: 429, every worker is over its limit.
    """

    STEER = "steer"
    NO_OVERRIDE = "no_override"
    UNAVAILABLE = "unavailable"
    SHED = "shed"


class Query(msgspec.Struct, frozen=True):
    """What is to be placed.

    model: the configured model; None where the request names none that is known.
    prompts: what could be keyed. reason: why nothing could be, "" if something was. text: what was
    read where nothing could be keyed; it is compared with what was sent before. demand: which
    workers it may go to. policy: what it asks for in its header, if that is configured.
    """

    model: str | None
    prompts: Sequence[Prompt] = ()
    reason: str = ""
    text: bytes = b""
    demand: Demand = ANY
    policy: str | None = None


def _always_live(_: str) -> str:
    return "live"


class Snapshot(msgspec.Struct, frozen=True):
    """All that a decision looks at besides the query and the time.

    overlaps: of every worker that holds something of a prompt, by name. load: of an endpoint, at a
    time. turn: decisions so far for this model. sent: what was sent where. state: of a worker's
    feeds, by name. unfit: what is known against endpoints now.
    """

    workers: Sequence[Worker]
    overlaps: Callable[[Prompt], Mapping[str, Overlap]]
    load: Callable[[str, float], Load]
    policy: str
    turn: int
    rules: Rules = Rules()
    sent: Sent | None = None
    state: Callable[[str], str] = _always_live
    unfit: Mapping[str, str] = {}


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and all that it was decided on.

    pick: ip:port, best first; empty where we have nothing to say. reason: overlap, or why the pick
    was made without it; docs/metrics.md lists them. certain_tokens, uncertain_tokens,
    uncached_tokens: of the first pick. worker: its name, "" if there is none. weighed_tokens: those
    of the prompt, or an estimate from its text. marks: of each prompt, to be recorded where it is
    sent.
    workers, excluded, loads and costs belong together: all candidates, why each cannot be picked
    ("" if it can), its load and its cost (None where neither was looked at). held: the overlaps of
    each prompt. claims: what was made of them, by name. affinity, running: the
    weights of an uncached token and of a request in flight.
    """

    model: str | None
    prompt_tokens: int
    pick: tuple[str, ...]
    reason: str
    certain_tokens: int
    uncertain_tokens: int
    uncached_tokens: float
    workers: Sequence[Worker]
    loads: Sequence[Load | None]
    held: Sequence[Mapping[str, Overlap]]
    worker: str
    verdict: Verdict
    policy: str
    weighed_tokens: float
    marks: Sequence[Marks]
    excluded: Sequence[str]
    costs: Sequence[float | None]
    claims: Mapping[str, Claims]
    affinity: float
    running: float


def decide(query: Query, snapshot: Snapshot, now: float, rng: Chance) -> Decision:
    """Places a query; looks only, books nothing.

    now: seconds of the clock that the load is kept in.
    """
    prompt_tokens = sum([len(prompt.tokens) for prompt in query.prompts])
    text = query.text[:MAX_TEXT_BYTES]
    weighed = float(prompt_tokens) if query.prompts else len(text) / TEXT_BYTES_PER_TOKEN
    held = [snapshot.overlaps(prompt) for prompt in query.prompts]
    marks = _marks(query, snapshot.sent)
    claims = _claims(held, marks, snapshot, now)
    survey = _survey(query, snapshot, claims, weighed, now)
    verdict, candidates = _candidates(survey, snapshot.rules)
    policy = snapshot.policy
    order = _order(candidates, survey, claims, (policy, weighed), (snapshot, rng))
    first = snapshot.workers[order[0]].name if order else ""
    claimed = claims.get(first, NO_CLAIMS)
    overlaps = [each[first] for each in held if first in each]
    certain = sum([overlap.certain_tokens for overlap in overlaps])
    uncertain = sum([overlap.uncertain_tokens for overlap in overlaps])
    return Decision(
        model=query.model,
        prompt_tokens=prompt_tokens,
        pick=tuple([snapshot.workers[at].endpoint for at in order]),
        reason=_reason(query, policy, verdict, (certain, uncertain), claimed),
        certain_tokens=certain,
        uncertain_tokens=uncertain,
        uncached_tokens=weighed - claimed.saved,
        workers=snapshot.workers,
        loads=survey.loads,
        held=held,
        worker=first,
        verdict=verdict,
        policy=policy,
        weighed_tokens=weighed,
        marks=marks,
        excluded=survey.excluded,
        costs=survey.costs,
        claims=claims,
        affinity=survey.affinity,
        running=snapshot.rules.weights.running,
    )


class _Survey(NamedTuple):
    """What is known of each worker, in their order; loads and costs are None of the excluded."""

    excluded: list[str]
    loads: list[Load | None]
    costs: list[float | None]
    affinity: float


def _marks(query: Query, sent: Sent | None) -> Sequence[Marks]:
    if sent is None:
        return ()
    if query.text:
        return (sent.text_marks(query.model, query.text[:MAX_TEXT_BYTES]),)
    return [sent.marks(prompt) for prompt in query.prompts]


def _claims(
    held: Sequence[Mapping[str, Overlap]], marks: Sequence[Marks], snapshot: Snapshot, now: float
) -> Mapping[str, Claims]:
    sent = snapshot.sent
    expected = [sent.expected(one, now) for one in marks] if sent is not None else []
    return claims_of(held, expected, snapshot.state, snapshot.rules.weights)


def _survey(
    query: Query, snapshot: Snapshot, claims: Mapping[str, Claims], weighed: float, now: float
) -> _Survey:
    weights, load, demand, unfit = (
        snapshot.rules.weights,
        snapshot.load,
        query.demand,
        snapshot.unfit,
    )
    is_plain = demand == ANY and not unfit
    excluded: list[str] = []
    loads: list[Load | None] = []
    utilization, eligible = 0.0, 0
    for worker in snapshot.workers:
        why = worker.excluded if is_plain else why_excluded(worker, demand, unfit)
        excluded.append(why)
        if why:
            loads.append(None)
            continue
        known = load(worker.endpoint, now)
        loads.append(known)
        utilization += known[3]
        eligible += 1
    affinity = affinity_of(weights, utilization / eligible if eligible else 0.0)
    running = weights.running
    costs: list[float | None] = []
    for worker, one in zip(snapshot.workers, loads, strict=True):
        if one is None:
            costs.append(None)
            continue
        in_flight, backlog, others = one[:3]
        claimed = claims.get(worker.name)
        uncached = weighed if claimed is None else weighed - claimed[0]
        costs.append(affinity * uncached + backlog + running * (in_flight + others))
    return _Survey(excluded, loads, costs, affinity)


def _candidates(survey: _Survey, rules: Rules) -> tuple[Verdict, list[int]]:
    """What is to be done, and among which workers; a limit gives way where all are over it."""
    eligible = [at for at, known in enumerate(survey.loads) if known is not None]
    if not eligible:
        return (Verdict.UNAVAILABLE if rules.refuses else Verdict.NO_OVERRIDE), []
    if rules.max_in_flight is None:
        return Verdict.STEER, eligible
    able = []
    for at in eligible:
        known = survey.loads[at]
        if known is not None and known.in_flight + known.others < rules.max_in_flight:
            able.append(at)
        else:
            survey.excluded[at] = OVER_LIMIT
    if able:
        return Verdict.STEER, able
    if rules.sheds:
        return Verdict.SHED, []
    for at in eligible:
        survey.excluded[at] = ""
    return Verdict.STEER, eligible


def _order(
    candidates: list[int],
    survey: _Survey,
    claims: Mapping[str, Claims],
    asked: tuple[str, float],
    around: tuple[Snapshot, Chance],
) -> list[int]:
    """The best candidates, at most as many as are named."""
    (policy, weighed), (snapshot, rng) = asked, around
    workers, loads, costs = snapshot.workers, survey.loads, survey.costs

    def saved() -> list[float]:
        return [claims.get(workers[at].name, NO_CLAIMS).saved for at in candidates]

    def in_flight() -> list[float]:
        known = [loads[at] or _IDLE for at in candidates]
        return [load.in_flight + load.others for load in known]

    rules = snapshot.rules
    columns = Columns(
        weighed,
        [costs[at] or 0.0 for at in candidates],
        saved,
        in_flight,
        snapshot.turn,
        rng,
        rules.cache_aware,
        rules.prefix_cache,
    )
    ranks = POLICIES[policy](columns)
    return [at for _, at in sorted(zip(ranks, candidates, strict=True))[:MAX_PICKS]]


def _reason(
    query: Query, policy: str, verdict: Verdict, held: tuple[int, int], claimed: Claims
) -> str:
    if verdict is not Verdict.STEER:
        return "shed" if verdict is Verdict.SHED else "no_worker"
    if query.reason:
        return query.reason
    if policy not in LOOK_AT_OVERLAP:
        return f"policy_{policy}"
    certain, uncertain = held
    kinds = (
        ("overlap", certain),
        ("uncertain_overlap", uncertain),
        ("speculative_overlap", claimed.speculative),
        ("approximate_overlap", claimed.approximate),
    )
    return next((kind for kind, tokens in kinds if tokens), "nothing_cached")
