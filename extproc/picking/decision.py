"""The decision: pure, and the same for a request that is routed and one that is explained."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from extproc.picking.claims import NO_CLAIMS, Claims, claims_of
from extproc.picking.decision_terms import Decision, Query, Snapshot, Verdict
from extproc.picking.eligibility import ANY, Worker, why_excluded
from extproc.picking.load import Load
from extproc.picking.marks import Marks
from extproc.picking.pick import MAX_PICKS, Chance, affinity_of
from extproc.picking.policies import LOOK_AT_OVERLAP, POLICIES, Columns
from extproc.picking.ranks import rank_of
from extproc.picking.rules import Rules
from extproc.picking.sent import Sent
from kvstate.overlap import Overlap

__all__ = ["Decision", "Query", "Snapshot", "Verdict", "Worker", "decide"]

# Of a text whose tokens are not known, so many bytes are taken for one.
TEXT_BYTES_PER_TOKEN = 4

# More of a text is not looked at: long bodies mostly carry media, which are few tokens.
MAX_TEXT_BYTES = 128 * 1024

_IDLE = Load()
OVER_LIMIT = "over its limit of requests"
FAILING = "answers request after request with failures"


def decide(query: Query, snapshot: Snapshot, now: float, rng: Chance) -> Decision:
    """Places a query; looks only, books nothing.

    now: seconds of the clock that the load is kept in.
    """
    prompts, workers, rules = query.prompts, snapshot.workers, snapshot.rules
    prompt_tokens = sum([len(prompt.tokens) for prompt in prompts])
    text_tokens = min(len(query.text), MAX_TEXT_BYTES) / TEXT_BYTES_PER_TOKEN
    weighed = float(prompt_tokens) if prompts else text_tokens
    held = [snapshot.overlaps(prompt) for prompt in prompts]
    marks = _marks(query, snapshot.sent)
    claims = _claims(held, marks, snapshot, now)
    survey = _survey(query, snapshot, claims, weighed, now)
    verdict, candidates = _candidates(survey, snapshot)
    policy = snapshot.policy
    order = _order(candidates, survey, claims, (policy, weighed), (snapshot, rng))
    first = workers[order[0]].name if order else ""
    claimed = claims.get(first, NO_CLAIMS)
    overlaps = [each[first] for each in held if first in each]
    certain = uncertain = 0
    for size, tiers, behind, _ in overlaps:
        certain += size * sum(tiers)
        uncertain += size * behind
    return Decision(
        model=query.model,
        prompt_tokens=prompt_tokens,
        pick=tuple([workers[at].endpoint for at in order]),
        reason=_reason(query, policy, verdict, (certain, uncertain), claimed),
        certain_tokens=certain,
        uncertain_tokens=uncertain,
        uncached_tokens=weighed - claimed.saved,
        workers=workers,
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
        running=rules.weights.running,
        rank=_rank(order, overlaps, survey, snapshot, now) if snapshot.ranks else None,
    )


class _Survey(NamedTuple):
    """What is known of each worker, in their order; loads and costs are None of the excluded.

    eligible: the places of the others.
    """

    eligible: list[int]
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
    weights, load, workers = snapshot.rules.weights, snapshot.load, snapshot.workers
    demand, unfit = query.demand, snapshot.unfit
    if demand == ANY and not unfit:
        excluded = [worker.excluded for worker in workers]
    else:
        excluded = [why_excluded(worker, demand, unfit) for worker in workers]
    eligible = [at for at, why in enumerate(excluded) if not why]
    known = [load(workers[at].endpoint, now) for at in eligible]
    mean = sum([one.utilization for one in known]) / len(known) if known else 0.0
    affinity, running = affinity_of(weights, mean), weights.running
    loads: list[Load | None] = [None] * len(workers)
    costs: list[float | None] = [None] * len(workers)
    for at, one in zip(eligible, known, strict=True):
        loads[at] = one
        name = workers[at].name
        uncached = weighed - claims[name].saved if name in claims else weighed
        costs[at] = (
            affinity * uncached + one.backlog_tokens + running * (one.in_flight + one.others)
        )
    return _Survey(eligible, excluded, loads, costs, affinity)


def _candidates(survey: _Survey, snapshot: Snapshot) -> tuple[Verdict, list[int]]:
    """What is to be done, and among which workers.

    Neither failures nor a limit leave out all of them: then both give way, unless the rules shed.
    """
    rules, left_out, eligible = snapshot.rules, snapshot.left_out, survey.eligible
    if not eligible:
        return (Verdict.UNAVAILABLE if rules.refuses else Verdict.NO_OVERRIDE), []
    if left_out:
        failing = [at for at in eligible if snapshot.workers[at].endpoint in left_out]
        eligible = _spared(eligible, failing, survey.excluded, FAILING)
    limit = rules.max_in_flight
    if limit is None:
        return Verdict.STEER, eligible
    full = [at for at in eligible if _requests(survey.loads[at]) >= limit]
    if rules.sheds and len(full) == len(eligible):
        for at in full:
            survey.excluded[at] = OVER_LIMIT
        return Verdict.SHED, []
    return Verdict.STEER, _spared(eligible, full, survey.excluded, OVER_LIMIT)


def _spared(candidates: list[int], bad: list[int], excluded: list[str], why: str) -> list[int]:
    """The candidates that are not bad; all of them where nobody else is left."""
    if not bad or len(bad) == len(candidates):
        return candidates
    for at in bad:
        excluded[at] = why
    return [at for at in candidates if not excluded[at]]


def _requests(load: Load | None) -> float:
    return 0.0 if load is None else load.in_flight + load.others


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
    best = sorted(range(len(ranks)), key=ranks.__getitem__)[:MAX_PICKS]
    return [candidates[at] for at in best]


def _rank(
    order: list[int],
    overlaps: Sequence[Overlap],
    survey: _Survey,
    snapshot: Snapshot,
    now: float,
) -> int | None:
    """The rank that the request is to name.

    Every worker that may answer has to have it: where all that are listed are away, the proxy takes
    another one.
    """
    ranks = snapshot.ranks
    if ranks is None or not overlaps:
        return None
    first = snapshot.workers[order[0]]
    running = snapshot.rules.weights.running
    counts = [
        ranks.count(worker.name)
        for worker, load in zip(snapshot.workers, survey.loads, strict=True)
        if load is not None
    ]
    work = ranks.work(first.endpoint, now, running)
    return rank_of(overlaps, counts, ranks.count(first.name), work)


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
    if certain or uncertain:
        return "overlap" if certain else "uncertain_overlap"
    if claimed.speculative or claimed.approximate:
        return "speculative_overlap" if claimed.speculative else "approximate_overlap"
    return "nothing_cached"
