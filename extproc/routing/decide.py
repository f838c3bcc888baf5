"""Decides where a request goes: a pure function, used to route requests and to explain them.

    step        what it finds                                             where
    eligible    which workers may answer at all                           candidates.eligibility
    savings     the tokens that each would not have to compute            savings.savings
    survey      the load and the cost of each, or of a sample             cost.survey
    terms       what else adds to the cost, or lowers it                  cost.term
    candidates  who is left without failing workers and full ones         limits
    order       the best of these by the policy                           order
    rank        which data-parallel rank of the pick the request names    candidates.ranks

It has no side effects: the clock and chance are arguments.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

from extproc.config.policies import POLICIES
from extproc.requests.request import RoutingRequest
from extproc.routing.candidates.eligibility import (
    Candidate,
    Roster,
    places_without,
    why_excluded,
)
from extproc.routing.candidates.pins import PinnedRank
from extproc.routing.candidates.ranks import Ranks, rank_of
from extproc.routing.candidates.sampling import Chance, sample_of
from extproc.routing.cost.fetch import Fetch
from extproc.routing.cost.patience import Patience
from extproc.routing.cost.room import Room, is_concerned
from extproc.routing.cost.siblings import Siblings, siblings_of
from extproc.routing.cost.survey import Survey, is_full, survey_of
from extproc.routing.cost.term import Term
from extproc.routing.decision import NO_FETCHES, Basis, ChargeColumn, Decision, Verdict
from extproc.routing.inputs.query import Query, demand_of
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.limits import candidates_of, sole_of
from extproc.routing.order import order_of
from extproc.routing.savings.belonging import CONVERSATION, RESPONSE
from extproc.routing.savings.claims import NO_CLAIMS, Claims, held_tokens
from extproc.routing.savings.savings import Savings, savings_of
from kvstate.overlap import Overlap, of_any_rank

NO_CHARGES: Mapping[str, ChargeColumn] = MappingProxyType({})

_endpoint_of = attrgetter("endpoint")

# Naming a member through its class is a search, which every request would make several times.
_STEER = Verdict.STEER


def decide(
    request: RoutingRequest,
    query: Query,
    snapshot: Snapshot,
    now: float,
    rng: Chance,
    terms: Sequence[Term] = (),
) -> Decision:
    """Decides where a request goes, without side effects.

    now: seconds of the loads' clock. terms: those of enabled features.
    """
    roster = snapshot.roster or Roster(snapshot.workers)
    excluded, eligible = _eligible(request, query, snapshot, roster)
    savings = savings_of(request, query, snapshot, eligible, now)
    survey = _survey(request, snapshot, roster, eligible, excluded, savings, now, rng)
    charges = _charges(survey, savings, snapshot, terms, now)
    verdict, candidates = candidates_of(request, query, survey, excluded, snapshot)
    if savings.belonging.by == RESPONSE:
        candidates = sole_of(candidates, survey, savings.belonging.sole)
    order = order_of(request, query, candidates, survey, savings, snapshot, rng)
    first = order[0].name if order else ""
    held: Sequence[Mapping[str, Overlap]] = snapshot.overlaps
    rank: PinnedRank | None = None
    if snapshot.ranks is not None:
        held, rank = _overlaps_of(first, order, eligible, snapshot, snapshot.ranks, now)
    certain, uncertain = held_tokens(first, held)
    loads, costs = survey.columns(len(snapshot.workers))
    basis = Basis(
        policy=snapshot.policy,
        prompt_tokens=savings.prompt_tokens,
        weighed_tokens=savings.weighed_tokens,
        certain_tokens=certain,
        uncertain_tokens=uncertain,
        workers=snapshot.workers,
        excluded=excluded,
        loads=loads,
        costs=costs,
        sampled=survey.sampled,
        overlaps=held,
        claims=savings.claims,
        belonging=savings.belonging,
        charges=charges,
        fetches=_fetches(charges) if charges else NO_FETCHES,
        affinity=survey.affinity,
        running=snapshot.rules.cost.running_tokens,
        media=query.media,
    )
    claimed = savings.claims.get(first, NO_CLAIMS)
    return Decision(
        verdict=verdict,
        model=query.model,
        pick=tuple(map(_endpoint_of, order)),
        worker=first,
        reason=_reason(query, verdict, basis, claimed),
        uncached_tokens=_uncached(first, basis, claimed),
        marks=savings.marks,
        basis=basis,
        rank=rank,
        of_class=request.of_class,
        tenant=request.tenant,
    )


def _eligible(
    request: RoutingRequest, query: Query, snapshot: Snapshot, roster: Roster
) -> tuple[list[str], Sequence[int]]:
    """Returns why each worker is excluded, and the indices of those that may answer.

    The indices are a range if all workers may.
    """
    subset, unfit = request.head.subset, snapshot.unfit
    if query.proxy_reason:
        return [query.proxy_reason] * len(snapshot.workers), ()
    if query.lora is None and subset is None and not unfit:
        return roster.excluded.copy(), roster.eligible
    demand = demand_of(request, query)
    excluded = [why_excluded(worker, demand, unfit) for worker in snapshot.workers]
    return excluded, places_without(excluded)


def _survey(
    request: RoutingRequest,
    snapshot: Snapshot,
    roster: Roster,
    eligible: Sequence[int],
    excluded: Sequence[str],
    savings: Savings,
    now: float,
    rng: Chance,
) -> Survey:
    """Returns the survey of a sample of the eligible workers; of all if the sample is full."""
    if 0 < snapshot.sample < len(eligible):
        sampled = _sampled(eligible, excluded, savings.saved, snapshot, roster, rng)
        survey = survey_of(eligible, sampled, snapshot, savings, now)
        if sampled is None or not is_full(survey, snapshot.rules, request.of_class):
            return survey
    return survey_of(eligible, None, snapshot, savings, now)


def _sampled(
    eligible: Sequence[int],
    excluded: Sequence[str],
    saved: Mapping[str, float],
    snapshot: Snapshot,
    roster: Roster,
    rng: Chance,
) -> list[int] | None:
    """Returns the indices of the workers to compare, random ones first; None for all.

    Failing workers are drawn only if no others are left. The snapshot's sample is not 0, and fewer
    than the eligible.
    """
    count, workers, ejected = snapshot.sample, snapshot.workers, snapshot.ejected
    if not POLICIES[snapshot.policy].is_sampled:
        return None
    if ejected:
        sound = [place for place in eligible if workers[place].endpoint not in ejected]
        eligible = sound or eligible
    places = roster.places
    holders = {
        places[name]: tokens
        for name, tokens in saved.items()
        if name in places and not excluded[places[name]]
    }
    return sample_of(eligible, holders, count, rng)


def _charges(
    survey: Survey, savings: Savings, snapshot: Snapshot, terms: Sequence[Term], now: float
) -> Mapping[str, ChargeColumn]:
    """Adds what the terms charge to the costs of a survey; returns it by the term's name."""
    belonging, cost = savings.belonging, snapshot.rules.cost
    if belonging.credit or cost.siblings_percent or is_concerned(belonging, survey):
        terms = (*_terms(survey, savings, snapshot, now), *terms)
    if not terms:  # most requests end here
        return NO_CHARGES
    charges: dict[str, ChargeColumn] = {}
    for term in terms:
        charge = term.charge(survey, savings)
        if charge is not None:
            survey.add(charge.tokens)
            column = survey.column(charge.tokens, len(snapshot.workers))
            charges[charge.name] = ChargeColumn(column, charge.fetches)
    return charges


def _fetches(charges: Mapping[str, ChargeColumn]) -> Mapping[str, Fetch]:
    """Returns what workers would fetch, of the term that knows it."""
    return next((one.fetches for one in charges.values() if one.fetches), NO_FETCHES)


def _terms(survey: Survey, savings: Savings, snapshot: Snapshot, now: float) -> Sequence[Term]:
    """Returns the terms that concern a request, besides those of features."""
    belonging, cost = savings.belonging, snapshot.rules.cost
    terms: list[Term] = []
    siblings = _siblings(savings, snapshot, now) if cost.siblings_percent else {}
    if siblings:
        terms.append(Siblings(siblings, cost.siblings_percent))
    if belonging.home in belonging.credit:
        terms.append(Patience(belonging.home, cost))
    homes = snapshot.homes
    if homes is not None and not siblings and is_concerned(belonging, survey):
        unsure = {*snapshot.ejected, *snapshot.doubted}
        terms.append(Room(snapshot.records, homes.returning, unsure, now))
    return terms


def _siblings(savings: Savings, snapshot: Snapshot, now: float) -> Mapping[str, int]:
    """Returns what the siblings of a request with one prompt just sent to workers."""
    sent, marks = snapshot.claims, savings.marks
    if sent is None or len(marks) != 1:
        return {}
    return siblings_of(savings.claims, sent.begun_at(marks[0]), now)


def _overlaps_of(
    first: str,
    order: Sequence[Candidate],
    eligible: Sequence[int],
    snapshot: Snapshot,
    ranks: Ranks,
    now: float,
) -> tuple[Sequence[Mapping[str, Overlap]], PinnedRank | None]:
    """Returns the overlaps of each prompt, and the rank that the request should name, if any.

    If an engine with several ranks chooses one itself, it may not be the one that holds the blocks;
    then the first pick's overlaps are those that any of its ranks holds.
    """
    held = snapshot.overlaps
    overlaps = [each[first] for each in held if first in each]
    if not overlaps:
        return held, None
    # every worker that may answer must have the rank: if all endpoints of the pick are down, the
    # proxy chooses another
    counts = [ranks.count(snapshot.workers[place].name) for place in eligible]
    work = ranks.work(order[0].endpoint, now, snapshot.rules.cost.running_tokens)
    pin = ranks.choice(first).pin
    rank = None if pin is None else rank_of(overlaps, counts, ranks.count(first), work)
    if pin is not None and rank is not None:
        return held, PinnedRank(rank, pin, ranks.path)
    if ranks.count(first) <= 1:
        return held, None
    return [
        {**each, first: of_any_rank(each[first])} if first in each else each for each in held
    ], None


def _uncached(first: str, basis: Basis, claimed: Claims) -> float:
    """Returns how many tokens the first pick probably has to compute.

    A conversation's worker has had all of its earlier turns, so there the claim counts fully: else
    each turn of a long conversation would look like much work to all others.
    """
    tokens, belonging = basis.weighed_tokens - claimed.saved, basis.belonging
    if belonging.by == CONVERSATION and first in belonging.credit:
        tokens = basis.weighed_tokens - claimed.approximate
    fetch = basis.fetches.get(first)
    if fetch is None or fetch.peer is not None:
        return tokens
    return max(0.0, tokens - fetch.tokens * fetch.share)


def _reason(query: Query, verdict: Verdict, basis: Basis, claimed: Claims) -> str:
    """Returns why the pick was made: by overlap, or without it."""
    if verdict is not _STEER and not query.proxy_reason:
        return "shed" if verdict is Verdict.SHED else "no_worker"
    if query.reason:
        return query.reason
    if not POLICIES[basis.policy].reads_caches:
        return f"policy_{basis.policy}"
    if basis.certain_tokens or basis.uncertain_tokens:
        return "overlap" if basis.certain_tokens else "uncertain_overlap"
    if claimed.speculative or claimed.approximate:
        return "speculative_overlap" if claimed.speculative else "approximate_overlap"
    return "nothing_cached"
