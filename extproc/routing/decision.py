"""Decides where a request goes: a pure function, used to route requests and to explain them."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

import msgspec

from extproc._core import lowest
from extproc.config.policies import POLICIES, Order, PolicyInput
from extproc.requests.outline import BYTES_PER_TOKEN
from extproc.requests.request_class import RequestClass
from extproc.requests.tenant_salt import Tenant
from extproc.routing.belonging import CONVERSATION, RESPONSE, Belonging, belonging_of
from extproc.routing.claim_table import ClaimTable
from extproc.routing.claims import NO_CLAIMS, Claims, claims_of, held_tokens
from extproc.routing.eligibility import ANY, Candidate, Roster, places_without, why_excluded
from extproc.routing.fetching import Fetch, Offers, lower_costs
from extproc.routing.load import Load
from extproc.routing.marks import Marks
from extproc.routing.patience import wait_at_home
from extproc.routing.pins import PinnedRank
from extproc.routing.policy_choice import endpoints_named
from extproc.routing.query import Media, Query, Snapshot
from extproc.routing.ranks import Ranks, rank_of
from extproc.routing.sampling import Chance, sample_of
from extproc.routing.siblings import prefer_siblings, siblings_of
from extproc.routing.spread import Rows
from extproc.routing.survey import Survey, is_full, survey_of
from kvstate.overlap import Overlap, Prompt, of_any_rank

# The rest of a longer body that is not read is ignored: such bodies mostly carry media, which are
# few tokens.
MAX_UNREAD_BYTES = 128 * 1024

OVER_LIMIT = "over its limit of requests"
OVER_CLASS_LIMIT = "over its limit of requests of this class"
# Why a request is left to the proxy.
FINDS_MODEL = "the model is not known here, so the proxy chooses"
CALLS_NO_MODEL = "it calls no model, so the proxy chooses"

_endpoint_of = attrgetter("endpoint")


class Verdict(Enum):
    """The outcome of a decision.

    STEER: the request goes to the pick. NO_OVERRIDE: the proxy chooses. UNAVAILABLE: 503. SHED:
    429, every worker is over its limit.
    """

    STEER = "steer"
    NO_OVERRIDE = "no_override"
    UNAVAILABLE = "unavailable"
    SHED = "shed"


# Naming a member through its class is a search, which every request would make several times.
_STEER = Verdict.STEER


class Split(msgspec.Struct, frozen=True):
    """Whether another worker computes the prompt for the one that answers.

    prefill: the decision among prefill workers, None if the answering worker computes the prompt.
    reason: the reason in words. cost_alone, cost_split: the cost in tokens of computing it there or
    elsewhere, None if not compared. outcome: the reason as the word by which it is counted.
    """

    prefill: "Decision | None"
    reason: str
    cost_alone: float | None = None
    cost_split: float | None = None
    outcome: str = ""


class PullSource(NamedTuple):
    """Another worker to pull a part of the prompt from.

    endpoint: the worker's; port: where it hands over. tokens: how many more it holds than the pick.
    """

    endpoint: str
    port: int
    tokens: int


class Basis(msgspec.Struct, frozen=True):
    """What a decision was based on, for those who explain, count and account for it.

    policy: its name. prompt_tokens: of the keyed prompts; weighed_tokens: the same, or an estimate
    from the text. certain_tokens, uncertain_tokens: what the first pick holds of them. workers,
    excluded, loads and costs are columns: all candidates, why each cannot be picked ("" if it can),
    its load and its cost (None if not compared). sampled: indices of the workers that were
    compared, None for all. overlaps: the overlaps of each prompt. claims: the weighed overlaps, by
    name. belonging: to which workers the request's conversation belongs. crowding: by how many
    tokens it avoids each worker for the conversations that live there (None if not compared), empty
    if it begins none. affinity, running: the weights of an uncached token and of a request in
    flight. fetches: what compared workers could fetch instead of computing it, by name.
    """

    policy: str
    prompt_tokens: int
    weighed_tokens: float
    certain_tokens: int
    uncertain_tokens: int
    workers: Sequence[Candidate]
    excluded: Sequence[str]
    loads: Rows[Load | None]
    costs: Rows[float | None]
    sampled: Sequence[int] | None
    overlaps: Sequence[Mapping[str, Overlap]]
    claims: Mapping[str, Claims]
    belonging: Belonging
    crowding: Rows[float | None]
    affinity: float
    running: float
    patience: float = 0.0
    media: Media | None = None
    fetches: Mapping[str, Fetch] = {}

    def worker_at(self, endpoint: str) -> str:
        """Returns the name of the worker at an endpoint, "" for an unknown endpoint."""
        for worker in self.workers:
            if worker.endpoint == endpoint:
                return worker.name
        return ""

    def claims_on(self, worker: str) -> Claims:
        """Returns what a worker is assumed to hold of the request."""
        return self.claims.get(worker, NO_CLAIMS)


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes: what serving it needs. `basis` says why it goes there.

    verdict: whether it goes anywhere at all. model: the configured one, None if unknown. pick:
    ip:port, best first; empty if the proxy chooses. worker: the name of the first, "" if there is
    none. reason: overlap, or why the pick was made without it; docs/metrics.md lists them. rank:
    the data-parallel rank that the request should name, None for none. uncached_tokens: those that
    the first pick has to compute. marks: each prompt's marks, recorded for the worker that gets it;
    so are the keys of its belonging.
    is_steered: whether the proxy gets the pick; if not, it is only noted, and the proxy chooses.
    split: None if every worker takes whole requests. source: the worker from which the pick should
    pull a part of the prompt, which is then left out of uncached_tokens; None for none. of_class:
    the class of the request, None without classes. tenant: whose request it is, for the recorder;
    None if nobody asks.
    """

    verdict: Verdict
    model: str | None
    pick: tuple[str, ...]
    worker: str
    reason: str
    uncached_tokens: float
    marks: Sequence[Marks]
    basis: Basis
    rank: PinnedRank | None = None
    is_steered: bool = True
    split: Split | None = None
    source: PullSource | None = None
    of_class: RequestClass | None = None
    tenant: Tenant | None = None

    @property
    def prefill(self) -> "Decision | None":
        """The decision for the prefill worker; None if the answering worker computes."""
        return None if self.split is None else self.split.prefill


def decide(query: Query, snapshot: Snapshot, now: float, rng: Chance) -> Decision:
    """Decides where a query goes, without side effects.

    now: seconds of the loads' clock.
    """
    prompts = query.prompts
    prompt_tokens = len(prompts[0].tokens) if len(prompts) == 1 else _tokens_in(prompts)
    weighed, state = _weighed(query, prompt_tokens), snapshot.state
    if query.media is not None and not query.media.is_whole:
        state = _unknown  # feeds show nothing of what is behind
    marks = _marks(query, snapshot.claims)
    claims = _claims(snapshot.overlaps, marks, snapshot, state, now) if query.reads_cache else {}
    roster = snapshot.roster or Roster(snapshot.workers)
    excluded, eligible = _eligible(query, snapshot, roster)
    saved = {name: one.saved for name, one in claims.items()}
    belonging = belonging_of(query, marks, eligible, snapshot, saved, weighed, now)
    for name, more in belonging.credit.items():
        saved[name] = max(saved.get(name, 0.0), more)
    sampled: list[int] | None = None
    if 0 < snapshot.sample < len(eligible):
        sampled = _sampled(eligible, excluded, saved, snapshot, roster, rng)
    siblings: Mapping[str, int] = {}
    if snapshot.rules.cost.siblings_percent:
        siblings = _siblings(claims, marks, snapshot, now)
    is_new = belonging.is_new and not siblings
    survey = survey_of(eligible, sampled, snapshot, saved, weighed, now, is_new=is_new)
    if sampled is not None and is_full(survey, snapshot.rules.max_in_flight, query.of_class):
        sampled = None
        survey = survey_of(eligible, None, snapshot, saved, weighed, now, is_new=is_new)
    if siblings:
        prefer_siblings(survey, siblings, snapshot.rules.cost)
    home = belonging.home
    patience = wait_at_home(survey, home, snapshot.rules.cost) if home else 0.0
    fetches: Mapping[str, Fetch] = {}
    if snapshot.offers is not None:
        fetches = _fetches(survey, snapshot, snapshot.offers, claims)
    verdict, candidates = _candidates(query, survey, excluded, snapshot)
    if belonging.by == RESPONSE:
        candidates = _sole(candidates, survey, belonging.sole)
    order = _order(query, candidates, survey, saved, weighed, snapshot, rng)
    first = order[0].name if order else ""
    held: Sequence[Mapping[str, Overlap]] = snapshot.overlaps
    rank: PinnedRank | None = None
    if snapshot.ranks is not None:
        held, rank = _overlaps_of(first, order, eligible, snapshot, snapshot.ranks, now)
    certain, uncertain = held_tokens(first, held)
    claimed = claims.get(first, NO_CLAIMS)
    uncached = _uncached(first, weighed, claimed, belonging, fetches)
    loads, costs, crowding = survey.columns(len(snapshot.workers))
    basis = Basis(
        policy=snapshot.policy,
        prompt_tokens=prompt_tokens,
        weighed_tokens=weighed,
        certain_tokens=certain,
        uncertain_tokens=uncertain,
        workers=snapshot.workers,
        excluded=excluded,
        loads=loads,
        costs=costs,
        sampled=sampled,
        overlaps=held,
        claims=claims,
        belonging=belonging,
        crowding=crowding,
        affinity=survey.affinity,
        running=snapshot.rules.cost.running_tokens,
        patience=patience,
        media=query.media,
        fetches=fetches,
    )
    return Decision(
        verdict=verdict,
        model=query.model,
        pick=tuple(map(_endpoint_of, order)),
        worker=first,
        reason=_reason(query, snapshot.policy, verdict, certain, uncertain, claimed),
        uncached_tokens=uncached,
        marks=marks,
        basis=basis,
        rank=rank,
        of_class=query.of_class,
        tenant=query.tenant,
    )


def _tokens_in(prompts: Sequence[Prompt]) -> int:
    return sum([len(prompt.tokens) for prompt in prompts])


def _unknown(_: str) -> str:
    """Returns a state in which what was sent to a worker counts."""
    return ""


def _weighed(query: Query, prompt_tokens: int) -> float:
    """Returns the tokens of a query, estimated if its prompts are not known."""
    if query.media is not None:
        return query.media.weighed_tokens
    if query.prompts:
        return float(prompt_tokens)
    if query.outline is not None:
        return query.outline.tokens
    return min(query.unread_bytes, MAX_UNREAD_BYTES) / BYTES_PER_TOKEN


def _marks(query: Query, sent: ClaimTable | None) -> Sequence[Marks]:
    if sent is None:
        return ()
    if query.outline is not None:
        if query.salt == "":
            return ()
        return (sent.text_marks(query.model, query.outline, query.lora, query.salt),)
    return list(map(sent.marks, query.prompts))


def _claims(
    held: Sequence[Mapping[str, Overlap]],
    marks: Sequence[Marks],
    snapshot: Snapshot,
    state: Callable[[str], str],
    now: float,
) -> Mapping[str, Claims]:
    sent = snapshot.claims
    expected = [sent.expected(one, now) for one in marks] if sent is not None else []
    return claims_of(held, expected, state, snapshot.rules.cost, snapshot.block_size)


def _siblings(
    claims: Mapping[str, Claims], marks: Sequence[Marks], snapshot: Snapshot, now: float
) -> Mapping[str, int]:
    """Returns what the siblings of a request with one prompt just sent to workers."""
    sent = snapshot.claims
    if sent is None or len(marks) != 1:
        return {}
    return siblings_of(claims, sent.begun_at(marks[0]), now)


def _fetches(
    survey: Survey, snapshot: Snapshot, offers: Offers, claims: Mapping[str, Claims]
) -> Mapping[str, Fetch]:
    """Returns what the compared workers can fetch of the only prompt, and lowers their costs."""
    overlaps = snapshot.overlaps[0] if snapshot.overlaps else {}

    def held(name: str) -> int:
        overlap, claimed = overlaps.get(name), claims.get(name, NO_CLAIMS)
        sent = claimed.speculative + claimed.approximate
        if overlap is None:
            return sent
        return overlap.certain_tokens + max(overlap.uncertain_tokens, sent)

    cost = snapshot.rules.cost
    return lower_costs(survey.costs, survey.workers, survey.loads, cost, offers, held)


def _uncached(
    first: str,
    weighed: float,
    claimed: Claims,
    belonging: Belonging,
    fetches: Mapping[str, Fetch],
) -> float:
    """Returns how many tokens the first pick probably has to compute.

    A conversation's worker has had all of its earlier turns, so there the claim counts fully: else
    each turn of a long conversation would look like much work to all others.
    """
    tokens = weighed - claimed.saved
    if belonging.by == CONVERSATION and first in belonging.credit:
        tokens = weighed - claimed.approximate
    fetch = fetches.get(first)
    if fetch is None or fetch.peer is not None:
        return tokens
    return max(0.0, tokens - fetch.tokens * fetch.share)


def _eligible(query: Query, snapshot: Snapshot, roster: Roster) -> tuple[list[str], Sequence[int]]:
    """Returns why each worker is excluded, and the indices of those that may answer.

    The indices are a range if all workers may.
    """
    demand, unfit = query.demand, snapshot.unfit
    if query.proxy_reason:
        return [query.proxy_reason] * len(snapshot.workers), ()
    if demand == ANY and not unfit:
        return roster.excluded.copy(), roster.eligible
    excluded = [why_excluded(worker, demand, unfit) for worker in snapshot.workers]
    return excluded, places_without(excluded)


def _sampled(
    eligible: Sequence[int],
    excluded: Sequence[str],
    saved: Mapping[str, float],
    snapshot: Snapshot,
    roster: Roster,
    chance: Chance,
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
    return sample_of(eligible, holders, count, chance)


def _candidates(
    query: Query, survey: Survey, excluded: list[str], snapshot: Snapshot
) -> tuple[Verdict, Sequence[int]]:
    """Returns the verdict, and the workers to choose among, by index in the survey.

    If ejections or the limit would leave out all workers, they are ignored, unless the rules shed.
    """
    rules, ejected = snapshot.rules, snapshot.ejected
    candidates: Sequence[int] = range(len(survey.places))
    if query.proxy_reason:
        return Verdict.NO_OVERRIDE, ()
    if not candidates:
        return (Verdict.UNAVAILABLE if rules.refuse else Verdict.NO_OVERRIDE), ()
    if ejected:
        failing = {
            at: ejected[survey.workers[at].endpoint]
            for at in candidates
            if survey.workers[at].endpoint in ejected
        }
        candidates = _without_bad(candidates, failing, survey, excluded)
    if query.of_class is not None and query.of_class.max_in_flight is not None:
        candidates = _within_class(candidates, query.of_class.max_in_flight, survey, excluded)
        if not candidates:
            return Verdict.SHED, ()
    limit = rules.max_in_flight
    if limit is None:
        return _STEER, candidates
    loads = survey.loads
    full = {at: OVER_LIMIT for at in candidates if loads[at].counted >= limit}
    if rules.shed and len(full) == len(candidates):
        for at in full:
            excluded[survey.places[at]] = OVER_LIMIT
        return Verdict.SHED, ()
    return Verdict.STEER, _without_bad(candidates, full, survey, excluded)


def _within_class(
    candidates: Sequence[int], limit: int, survey: Survey, excluded: list[str]
) -> Sequence[int]:
    """Returns the candidates with fewer requests of the class than its limit; enters the others."""
    full = [at for at in candidates if survey.loads[at].peers >= limit]
    for at in full:
        excluded[survey.places[at]] = OVER_CLASS_LIMIT
    return [at for at in candidates if survey.loads[at].peers < limit] if full else candidates


def _without_bad(
    candidates: Sequence[int], bad: Mapping[int, str], survey: Survey, excluded: list[str]
) -> Sequence[int]:
    """Returns the candidates that are not bad, or all of them if all are bad.

    bad: the reason for each bad one; entered in `excluded` unless all are bad.
    """
    if not bad or len(bad) == len(candidates):
        return candidates
    for at, why in bad.items():
        excluded[survey.places[at]] = why
    return [at for at in candidates if not excluded[survey.places[at]]]


def _sole(candidates: Sequence[int], survey: Survey, sole: str) -> Sequence[int]:
    """Returns the only candidate that can answer, or all if it is none of them."""
    return [at for at in candidates if survey.workers[at].name == sole] or candidates


def _order(
    query: Query,
    candidates: Sequence[int],
    survey: Survey,
    saved: Mapping[str, float],
    weighed: float,
    snapshot: Snapshot,
    chance: Chance,
) -> list[Candidate]:
    """Returns the best candidates, at most as many as are named to the proxy."""
    workers, costs = survey.workers, survey.costs
    if len(candidates) != len(workers):
        workers = [workers[at] for at in candidates]
        costs = [costs[at] for at in candidates]
    ranks = costs
    if snapshot.policy != "cost":  # the usual one needs nothing more
        ranks = _ranks(query, candidates, survey, workers, costs, saved, weighed, snapshot)
    count = endpoints_named(snapshot.rules, is_duplex=False)
    return list(map(workers.__getitem__, lowest(ranks, count, chance.random)))


def _ranks(
    query: Query,
    candidates: Sequence[int],
    survey: Survey,
    workers: Sequence[Candidate],
    costs: list[float],
    saved: Mapping[str, float],
    weighed: float,
    snapshot: Snapshot,
) -> Order:
    """Returns the ranks of candidates by the snapshot's policy."""
    ranking = POLICIES[snapshot.policy]

    def requests() -> list[float]:
        each = survey.loads.requests()
        return [each[at] for at in candidates]

    columns = PolicyInput(
        rules=snapshot.rules,
        prompt_tokens=weighed,
        costs=costs,
        saved=lambda: [saved.get(worker.name, 0.0) for worker in workers],
        in_flight=requests,
        endpoints=lambda: list(map(_endpoint_of, workers)),
        turn=snapshot.turn,
        session=query.session,
        header=query.policy_headers.get(ranking.reads_header, b""),
    )
    return ranking.rank(columns)


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


def _reason(
    query: Query, policy: str, verdict: Verdict, certain: int, uncertain: int, claimed: Claims
) -> str:
    if verdict is not _STEER and not query.proxy_reason:
        return "shed" if verdict is Verdict.SHED else "no_worker"
    if query.reason:
        return query.reason
    if not POLICIES[policy].reads_caches:
        return f"policy_{policy}"
    if certain or uncertain:
        return "overlap" if certain else "uncertain_overlap"
    if claimed.speculative or claimed.approximate:
        return "speculative_overlap" if claimed.speculative else "approximate_overlap"
    return "nothing_cached"
