"""Decides where a request goes: a pure function, used to route requests and to explain them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from itertools import compress
from typing import NamedTuple, TypeVar

import msgspec

from extproc.config.schema import Policy
from extproc.picking.eligibility import ANY, Candidate, Demand, Roster, places_without, why_excluded
from extproc.picking.load import Load
from extproc.picking.policies import (
    LOOK_AT_OVERLAP,
    MAX_SESSION_LETTERS,
    POLICIES,
    SAMPLED,
    Chance,
    Columns,
    Ranks,
    affinity_of,
    best,
    endpoints_named,
    rank_of,
    sample_of,
    session_credit,
)
from extproc.picking.sent import NO_CLAIMS, Claims, Marks, Sent, claims_of
from extproc.structs import Frozen, Light
from kvstate.overlap import Overlap, Prompt, of_any_rank


class Verdict(Enum):
    """The outcome of a decision.

    STEER: the request goes to the pick. NO_OVERRIDE: the proxy chooses. UNAVAILABLE: 503. SHED:
    429, every worker is over its limit.
    """

    STEER = "steer"
    NO_OVERRIDE = "no_override"
    UNAVAILABLE = "unavailable"
    SHED = "shed"


class Query(Frozen, frozen=True):
    """A request to place.

    model: the configured model; None if the request names no known one. prompts: the keyed prompts.
    reason: why there are no prompts, "" if there are. text: the text of a prompt without tokens; it
    is compared with earlier texts of the same adapter and salt (lora, salt; a salt of "" is unknown
    and matches none). unread_bytes: size of a body that was not read. reads_cache: False if the
    worker will compute the whole prompt, whatever it holds. left_to_proxy: why the proxy chooses,
    "" if it does not. demand: which workers are allowed. policy: the policy named in its header, if
    that is configured. answers: how many answers it wants for each prompt. forms: the forms of the
    prompts that were tokenized here (`extproc.requests.prompt`), 0 if the client sent token ids.
    may_split: whether one worker can compute the prompt and another one answer. session: the
    client's session, "" for none; it counts only if the prompt's tokens are not known.
    """

    model: str | None
    prompts: Sequence[Prompt] = ()
    reason: str = ""
    text: bytes = b""
    lora: str | None = None
    salt: str | None = None
    unread_bytes: int = 0
    reads_cache: bool = True
    left_to_proxy: str = ""
    demand: Demand = ANY
    policy: str | None = None
    answers: int = 1
    forms: int = 0
    may_split: bool = True
    session: str = ""

    @property
    def sole(self) -> Prompt | None:
        """Returns the prompt if there is only one, with one answer; else None.

        Only then can the engine's report be compared: vLLM reports the sum over prompts, or the
        last of several answers, whose blocks the first answer stored.
        """
        return self.prompts[0] if len(self.prompts) == 1 and self.answers == 1 else None


def _always_live(_: str) -> str:
    return "live"


def one_token(_: str) -> int:
    """Returns 1: without a known block size, any length counts."""
    return 1


class Snapshot(Frozen, frozen=True):
    """Everything that a decision depends on besides the query and the time.

    held: for each prompt, the overlaps of the workers that hold a part of it. load: returns the
    load of an endpoint at a time. turn: decisions so far for this model. sent: the record of
    earlier requests. state: returns the state of a worker's feeds, by name. unfit: endpoints that
    get no requests, and why. ejected: failing endpoints, and why; picked only if no other is left.
    doubted: endpoints whose last answer failed or came from elsewhere; they compute prompts for
    others only if all are doubted. ranks: the workers' ranks, if requests may name one. block_size:
    returns the block size of a worker's cache in tokens, by name. sample: how many random workers
    are compared, besides those that hold a part of the prompt; 0 compares all. roster: the workers'
    roster, None if not made yet.
    """

    workers: Sequence[Candidate]
    held: Sequence[Mapping[str, Overlap]]
    load: Callable[[str, float], Load]
    policy: str
    turn: int
    rules: Policy = Policy()
    sent: Sent | None = None
    state: Callable[[str], str] = _always_live
    unfit: Mapping[str, str] = {}
    ejected: Mapping[str, str] = {}
    doubted: Collection[str] = ()
    ranks: Ranks | None = None
    block_size: Callable[[str], int] = one_token
    sample: int = 0
    roster: Roster | None = None


class Split(Frozen, frozen=True):
    """Whether another worker computes the prompt for the one that answers.

    prefill: the decision among prefill workers, None if the answering worker computes the prompt.
    why: the reason in words. here, apart: the cost in tokens of computing it there or elsewhere,
    None if not compared. outcome: the reason as the word by which it is counted.
    """

    prefill: "Decision | None"
    why: str
    here: float | None = None
    apart: float | None = None
    outcome: str = ""


class Source(NamedTuple):
    """Another worker to pull a part of the prompt from.

    endpoint: the worker's; port: where it hands over. tokens: how many more it holds than the pick.
    """

    endpoint: str
    port: int
    tokens: int


class Decision(Frozen, frozen=True):
    """Where a request goes, and everything that the decision was based on.

    pick: ip:port, best first; empty if the proxy chooses. reason: overlap, or why the pick was made
    without it; docs/metrics.md lists them. certain_tokens, uncertain_tokens, uncached_tokens: of
    the first pick. worker: its name, "" if there is none. weighed_tokens: the prompt's tokens, or
    an estimate from its text. marks: each prompt's marks, recorded for the worker that gets it.
    workers, excluded, loads and costs are columns: all candidates, why each cannot be picked ("" if
    it can), its load and its cost (None if not compared). held: the overlaps of each prompt.
    claims: the weighed overlaps, by name. affinity, running: the weights of an uncached token and
    of a request in flight. rank: the data-parallel rank that the request should name, None for
    none. sampled: indices of the workers that were compared, None for all. split: None if every
    worker takes whole requests. session: the workers of the request's session, best first, with
    the tokens by which each is preferred. source: the worker from which the pick should pull a part
    of the prompt, which is then left out of uncached_tokens; None for none. is_steered: whether the
    proxy gets the pick; if not, it is only noted, and the proxy chooses. conversation: a hash of
    the conversation's beginning; 0 if it is unknown, or not needed because all requests are
    steered.
    """

    model: str | None
    prompt_tokens: int
    pick: tuple[str, ...]
    reason: str
    certain_tokens: int
    uncertain_tokens: int
    uncached_tokens: float
    workers: Sequence[Candidate]
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
    rank: int | None = None
    sampled: Sequence[int] | None = None
    split: Split | None = None
    session: Mapping[str, float] = {}
    source: Source | None = None
    is_steered: bool = True
    conversation: int = 0

    @property
    def prefill(self) -> "Decision | None":
        """Returns the decision for the prefill worker; None if the answering worker computes."""
        return None if self.split is None else self.split.prefill


__all__ = ["Candidate", "Decision", "Query", "Snapshot", "Source", "Split", "Verdict", "decide"]

# Estimated bytes of one token, for a text whose tokens are not known.
TEXT_BYTES_PER_TOKEN = 4

# The rest of a longer text is ignored: long bodies mostly carry media, which are few tokens.
MAX_TEXT_BYTES = 128 * 1024

Value = TypeVar("Value")

OVER_LIMIT = "over its limit of requests"
# Why a request is left to the proxy.
FINDS_MODEL = "the model is not known here, so the proxy chooses"
CALLS_NO_MODEL = "it calls no model, so the proxy chooses"


def decide(query: Query, snapshot: Snapshot, now: float, rng: Chance) -> Decision:
    """Decides where a query goes, without side effects.

    now: seconds of the loads' clock.
    """
    prompts, workers, rules = query.prompts, snapshot.workers, snapshot.rules
    prompt_tokens = sum([len(prompt.tokens) for prompt in prompts])
    text_bytes = len(query.text) or query.unread_bytes
    text_tokens = min(text_bytes, MAX_TEXT_BYTES) / TEXT_BYTES_PER_TOKEN
    weighed = float(prompt_tokens) if prompts else text_tokens
    held = snapshot.held
    marks = _marks(query, snapshot.sent)
    claims = _claims(held, marks, snapshot, now) if query.reads_cache else {}
    roster = snapshot.roster or Roster(workers)
    excluded, eligible = _eligible(query, snapshot, roster)
    session = _session(query, eligible, snapshot, weighed) if query.session else {}
    saved = _saved(claims, session)
    sampled = _sampled(eligible, excluded, saved, (snapshot, roster), rng)
    survey = _survey(eligible, sampled, snapshot, saved, weighed, now)
    if sampled is not None and _is_full(survey, rules.max_in_flight):
        sampled = None
        survey = _survey(eligible, None, snapshot, saved, weighed, now)
    verdict, candidates = _candidates(query, survey, excluded, snapshot)
    order = _order(candidates, survey, saved, weighed, (snapshot, rng))
    first = order[0].name if order else ""
    claimed = claims.get(first, NO_CLAIMS)
    overlaps = [each[first] for each in held if first in each]
    rank = _rank(order, overlaps, eligible, snapshot, now) if snapshot.ranks else None
    if rank is None and snapshot.ranks and overlaps and snapshot.ranks.count(first) > 1:
        # the engine chooses a rank itself, perhaps not the one that holds the blocks
        overlaps = [of_any_rank(one) for one in overlaps]
        held = [
            {**each, first: of_any_rank(each[first])} if first in each else each for each in held
        ]
    certain = uncertain = 0
    for size, tiers, behind, _ in overlaps:
        certain += size * sum(tiers)
        uncertain += size * behind
    return Decision(
        model=query.model,
        prompt_tokens=prompt_tokens,
        pick=tuple([worker.endpoint for worker in order]),
        reason=_reason(query, snapshot.policy, verdict, (certain, uncertain), claimed),
        certain_tokens=certain,
        uncertain_tokens=uncertain,
        uncached_tokens=weighed - claimed.saved,
        workers=workers,
        loads=survey.spread(survey.loads, len(workers)),
        held=held,
        worker=first,
        verdict=verdict,
        policy=snapshot.policy,
        weighed_tokens=weighed,
        marks=marks,
        excluded=excluded,
        costs=survey.spread(survey.costs, len(workers)),
        claims=claims,
        affinity=survey.affinity,
        running=rules.cost.running_tokens,
        rank=rank,
        sampled=sampled,
        session=session,
    )


class _Survey(Light, frozen=True, gc=False):
    """What is known of the workers that are compared.

    places: their indices among all workers.
    """

    places: Sequence[int]
    workers: Sequence[Candidate]
    loads: list[Load]
    costs: list[float]
    affinity: float

    def spread(self, own: Sequence[Value], count: int) -> Sequence[Value | None]:
        """Returns a column of all workers, with None for those that were not compared."""
        if isinstance(self.places, range):  # a range: all were compared
            return own
        column: list[Value | None] = [None] * count
        for place, value in zip(self.places, own, strict=True):
            column[place] = value
        return column


def _marks(query: Query, sent: Sent | None) -> Sequence[Marks]:
    if sent is None:
        return ()
    if query.text:
        if query.salt == "":
            return ()
        text = query.text[:MAX_TEXT_BYTES]
        return (sent.text_marks(query.model, text, query.lora, query.salt),)
    return [sent.marks(prompt) for prompt in query.prompts]


def _claims(
    held: Sequence[Mapping[str, Overlap]], marks: Sequence[Marks], snapshot: Snapshot, now: float
) -> Mapping[str, Claims]:
    sent = snapshot.sent
    expected = [sent.expected(one, now) for one in marks] if sent is not None else []
    return claims_of(held, expected, snapshot.state, snapshot.rules.cost, snapshot.block_size)


def _saved(claims: Mapping[str, Claims], session: Mapping[str, float]) -> dict[str, float]:
    """Returns the tokens by which each worker is preferred: those saved, or its session credit."""
    saved = {name: one.saved for name, one in claims.items()}
    for name, tokens in session.items():
        saved[name] = max(saved.get(name, 0.0), tokens)
    return saved


def _session(
    query: Query, eligible: Sequence[int], snapshot: Snapshot, weighed: float
) -> dict[str, float]:
    """Returns the workers of the query's session, with the tokens by which each is preferred.

    Ejected workers are left out unless all are ejected. Empty if the prompt's tokens are known, the
    cache is not read, or the session's name is too long.
    """
    if query.prompts or not query.reads_cache or len(query.session) > MAX_SESSION_LETTERS:
        return {}
    # by address, since routers with different sources may name workers differently
    names = {one.endpoint: one.name for one in map(snapshot.workers.__getitem__, eligible)}
    sound = [endpoint for endpoint in names if endpoint not in snapshot.ejected]
    percent = snapshot.rules.cost.uncertain_percent
    credit = session_credit(query.session, sound or list(names), weighed)
    return {names[endpoint]: tokens * percent / 100 for endpoint, tokens in credit.items()}


def _eligible(query: Query, snapshot: Snapshot, roster: Roster) -> tuple[list[str], Sequence[int]]:
    """Returns why each worker is excluded, and the indices of those that may answer.

    The indices are a range if all workers may.
    """
    demand, unfit = query.demand, snapshot.unfit
    if query.left_to_proxy:
        return [query.left_to_proxy] * len(snapshot.workers), ()
    if demand == ANY and not unfit:
        return roster.excluded.copy(), roster.eligible
    excluded = [why_excluded(worker, demand, unfit) for worker in snapshot.workers]
    return excluded, places_without(excluded)


def _sampled(
    eligible: Sequence[int],
    excluded: Sequence[str],
    saved: Mapping[str, float],
    around: tuple[Snapshot, Roster],
    chance: Chance,
) -> list[int] | None:
    """Returns the indices of the workers to compare, random ones first; None for all.

    Failing workers are drawn only if no others are left.
    """
    snapshot, roster = around
    count, workers, ejected = snapshot.sample, snapshot.workers, snapshot.ejected
    if not 0 < count < len(eligible) or snapshot.policy not in SAMPLED:
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


def _survey(
    eligible: Sequence[int],
    sampled: Sequence[int] | None,
    snapshot: Snapshot,
    saved: Mapping[str, float],
    weighed: float,
    now: float,
) -> _Survey:
    cost, load, workers = snapshot.rules.cost, snapshot.load, snapshot.workers
    places = eligible if sampled is None else sampled
    if not isinstance(places, range):
        workers = [workers[place] for place in places]
    loads = [load(worker.endpoint, now) for worker in workers]
    drawn = loads if sampled is None else loads[: snapshot.sample]
    if (
        sampled is None and snapshot.ejected
    ):  # failing workers are idle, which says nothing about the others
        sound = [worker.endpoint not in snapshot.ejected for worker in workers]
        drawn = list(compress(loads, sound)) or loads
    mean = least = 0.0
    if drawn:
        mean = sum([one.utilization for one in drawn]) / len(drawn)
        least = min([one.backlog_tokens * one.slowness for one in drawn])
    affinity = affinity_of(cost, mean, least / cost.prefill_tokens_per_second)
    running = cost.running_tokens
    uncached = affinity * weighed
    costs = [
        (uncached + one.backlog_tokens + running * (one.in_flight + one.others)) * one.slowness
        for one in loads
    ]
    if saved:
        for at, worker in enumerate(workers):
            if worker.name in saved:
                costs[at] -= affinity * saved[worker.name] * loads[at].slowness
    return _Survey(places, workers, loads, costs, affinity)


def _is_full(survey: _Survey, limit: int | None) -> bool:
    """Returns whether all compared workers are at their limit of requests."""
    return limit is not None and all(one.in_flight + one.others >= limit for one in survey.loads)


def _candidates(
    query: Query, survey: _Survey, excluded: list[str], snapshot: Snapshot
) -> tuple[Verdict, Sequence[int]]:
    """Returns the verdict, and the workers to choose among, by index in the survey.

    If ejections or the limit would leave out all workers, they are ignored, unless the rules shed.
    """
    rules, ejected = snapshot.rules, snapshot.ejected
    candidates: Sequence[int] = range(len(survey.places))
    if query.left_to_proxy:
        return Verdict.NO_OVERRIDE, ()
    if not candidates:
        return (Verdict.UNAVAILABLE if rules.refuse else Verdict.NO_OVERRIDE), ()
    if ejected:
        failing = {
            at: ejected[survey.workers[at].endpoint]
            for at in candidates
            if survey.workers[at].endpoint in ejected
        }
        candidates = _spared(candidates, failing, survey, excluded)
    limit = rules.max_in_flight
    if limit is None:
        return Verdict.STEER, candidates
    loads = survey.loads
    full = {at: OVER_LIMIT for at in candidates if loads[at].in_flight + loads[at].others >= limit}
    if rules.shed and len(full) == len(candidates):
        for at in full:
            excluded[survey.places[at]] = OVER_LIMIT
        return Verdict.SHED, ()
    return Verdict.STEER, _spared(candidates, full, survey, excluded)


def _spared(
    candidates: Sequence[int], bad: Mapping[int, str], survey: _Survey, excluded: list[str]
) -> Sequence[int]:
    """Returns the candidates that are not bad, or all of them if all are bad.

    bad: the reason for each bad one; entered in `excluded` unless all are bad.
    """
    if not bad or len(bad) == len(candidates):
        return candidates
    for at, why in bad.items():
        excluded[survey.places[at]] = why
    return [at for at in candidates if not excluded[survey.places[at]]]


def _order(
    candidates: Sequence[int],
    survey: _Survey,
    saved: Mapping[str, float],
    weighed: float,
    around: tuple[Snapshot, Chance],
) -> list[Candidate]:
    """Returns the best candidates, at most as many as are named to the proxy."""
    snapshot, chance = around
    workers, loads, costs, rules = survey.workers, survey.loads, survey.costs, snapshot.rules
    if len(candidates) != len(workers):
        workers = [workers[at] for at in candidates]
        loads = [loads[at] for at in candidates]
        costs = [costs[at] for at in candidates]
    columns = Columns(
        weighed,
        costs,
        lambda: [saved.get(worker.name, 0.0) for worker in workers],
        lambda: [load.in_flight + load.others for load in loads],
        snapshot.turn,
        rules.cache_aware,
        rules.prefix_cache,
    )
    ranked = POLICIES[snapshot.policy](columns)
    return [workers[at] for at in best(ranked, chance, endpoints_named(rules, is_duplex=False))]


def _rank(
    order: Sequence[Candidate],
    overlaps: Sequence[Overlap],
    eligible: Sequence[int],
    snapshot: Snapshot,
    now: float,
) -> int | None:
    """Returns the rank that the request should name, None for none.

    Every worker that may answer must have it: if all endpoints of the pick are down, the proxy
    chooses another.
    """
    ranks = snapshot.ranks
    if ranks is None or not overlaps:
        return None
    first = order[0]
    counts = [ranks.count(snapshot.workers[place].name) for place in eligible]
    work = ranks.work(first.endpoint, now, snapshot.rules.cost.running_tokens)
    return rank_of(overlaps, counts, ranks.count(first.name), work)


def _reason(
    query: Query, policy: str, verdict: Verdict, held: tuple[int, int], claimed: Claims
) -> str:
    if verdict is not Verdict.STEER and not query.left_to_proxy:
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


# When a client that was refused because all workers are busy may try again.
RETRY_AFTER_SECONDS = 1


class Refusal(NamedTuple):
    """An answer instead of a worker's; body is JSON."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def refusal_of(verdict: Verdict) -> Refusal | None:
    """Returns the answer for a verdict that refuses the request, None if it continues."""
    if verdict is Verdict.SHED:
        retry = ("retry-after", str(RETRY_AFTER_SECONDS))
        return _refusal(429, "RateLimitError", "all workers are busy; try again", retry)
    if verdict is Verdict.UNAVAILABLE:
        return _refusal(503, "ServiceUnavailableError", "no worker can take this request")
    return None


def refused_body() -> Refusal:
    """Returns the answer to a body that is no JSON object, or that engines may read differently."""
    return _refusal(400, "BadRequestError", "the request body is not a JSON object")


def _refusal(status: int, kind: str, message: str, *headers: tuple[str, str]) -> Refusal:
    error = {"message": message, "type": kind, "param": None, "code": status}
    body = msgspec.json.encode({"error": error})
    return Refusal(status, (("content-type", "application/json"), *headers), body)
