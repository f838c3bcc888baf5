"""Explains a decision: every candidate, every term of its cost, and a sentence."""

from collections.abc import Callable, Iterator
from typing import Any

from extproc.config.policies import POLICIES
from extproc.requests.compression import COMPRESSED
from extproc.routing.cost.fetch import FETCHED
from extproc.routing.cost.patience import PATIENCE
from extproc.routing.cost.room import CONVERSATIONS
from extproc.routing.cost.siblings import SIBLINGS
from extproc.routing.decision import CALLS_NO_MODEL, FINDS_MODEL, Basis, Decision, Split, Verdict
from extproc.routing.handing import Handing
from extproc.routing.inputs.query import Media
from extproc.routing.load.loads import Load
from extproc.routing.savings.belonging import CONVERSATION, RESPONSE, SESSION
from kvstate.overlap import Tier


def _not_known(_: str) -> Load | None:
    return None


def explanation(
    decision: Decision,
    state: Callable[[str], str],
    load: Callable[[str], Load | None] = _not_known,
) -> dict[str, Any]:
    """Returns the answer of POST /explain, which is also a line of the decision log.

    state: returns the state of a worker's feeds, by its name. load: returns the load of an endpoint
    at the time of the decision, for workers that were not compared; None if unknown.
    """
    return explanation_with(decision, list(candidates(decision, state, load)))


def candidates(
    decision: Decision,
    state: Callable[[str], str],
    load: Callable[[str], Load | None] = _not_known,
) -> Iterator[dict[str, Any]]:
    """Yields the entry of each candidate; a thousand take ten milliseconds."""
    basis = decision.basis
    sampled = None if basis.sampled is None else frozenset(basis.sampled)
    for at, worker in enumerate(basis.workers):
        is_sampled = sampled is None or at in sampled or bool(basis.excluded[at])
        known = basis.loads[at] if is_sampled else load(worker.endpoint)
        shown = _candidate(basis, at, state(worker.name), known or Load())
        shown["sampled"] = is_sampled
        if not is_sampled and known is None:
            shown["in_flight"] = shown["cost"] = shown["cost_terms"] = None
        yield shown


def explanation_with(decision: Decision, shown: object) -> dict[str, Any]:
    """Returns the explanation with the given candidates."""
    handing = decision.handing
    more = {} if handing is None else {"token_ids": _token_ids(handing)}
    return {
        "model": decision.model,
        "prompt_tokens": decision.basis.prompt_tokens,
        "weighed_tokens": round(decision.basis.weighed_tokens),
        "policy": decision.basis.policy,
        "candidates": shown,
        "pick": list(decision.pick),
        "rank": None if decision.rank is None else decision.rank.rank,
        "verdict": decision.verdict.value,
        "class": None if decision.of_class is None else decision.of_class.name,
        "steered": decision.is_steered,
        "reason": decision.reason,
        "decided_by": decided_by(decision),
        "decided": decided(decision),
        "session": _session_worker(decision),
        "why": reason_sentence(decision),
        "held_seconds": round(decision.held_seconds, 1),
        "prefill": _prefill(decision),
        "loads": loading_sentence(decision),
        "source": None if decision.source is None else decision.source._asdict(),
        "media": _media(decision.basis.media),
        **more,
    }


def _token_ids(handing: Handing) -> dict[str, Any]:
    """Returns whether a request's token ids go with it, and why not."""
    return {
        "handed": handing.is_handed,
        "outcome": handing.outcome,
        "why": handing.in_words,
    }


# Of more media items, only the first are shown.
SHOWN_ITEMS = 64


def _media(media: Media | None) -> dict[str, Any] | None:
    """Returns what is known of a request's media, None if it has none."""
    if media is None:
        return None
    return {
        "keyed": media.is_whole,
        "count": len(media.items),
        "known": sum([one.is_known for one in media.items]),
        "items": [
            {
                "kind": one.kind,
                "known": one.is_known,
                "exact": one.is_exact,
                "tokens": round(one.tokens),
            }
            for one in media.items[:SHOWN_ITEMS]
        ],
    }


# What decided, and how it is said of requests without known tokens, on the page too.
LOAD, POLICY, CACHE, TEXTS, SPREAD = "load", "policy", "cache", "texts", "spread"
_WORDS = {
    LOAD: "load alone decided",
    POLICY: "the policy decided",
    SPREAD: "the conversations that live at the worker with most of it leave less room there",
    SESSION: "its session decided",
    CONVERSATION: "its conversation decided",
    RESPONSE: "only the worker that keeps the response can go on",
}

# What is said of the worker to which a request belongs.
_OWNERS = {
    CONVERSATION: "its conversation was last at",
    SESSION: "its session belongs to",
    RESPONSE: "its previous response is at",
}


def decided_by(decision: Decision) -> str:
    """Returns what decided; "" if no worker was picked.

    cache: what the worker holds or was sent, by tokens. texts: the same by the record of texts, for
    a request whose tokens are not known. conversation, session, response: where the request
    belongs, or what it would have left, if a move cost nothing. policy: one that ignores caches.
    load: nothing else. spread: a conversation avoids a worker that would have been the best,
    because of those that live there.
    """
    if not decision.pick:
        return ""
    basis, worker = decision.basis, decision.worker
    if basis.belonging.sole == worker:
        return RESPONSE
    if not POLICIES[basis.policy].reads_caches:
        return POLICY
    if _is_spread(decision):
        return CONVERSATION if basis.belonging.home == worker else SPREAD
    claimed = basis.claims_on(worker)
    if basis.certain_tokens or basis.uncertain_tokens or claimed.saved:
        return CACHE if basis.prompt_tokens else TEXTS
    return basis.belonging.by if worker in basis.belonging.credit else LOAD


def _is_spread(decision: Decision) -> bool:
    """Returns whether another worker would have cost less without the conversations."""
    basis = decision.basis
    if basis.policy != "cost" or CONVERSATIONS not in basis.charges:
        return False
    without = {
        worker.endpoint: cost - basis.charged(CONVERSATIONS, at)
        for at, (worker, cost) in enumerate(zip(basis.workers, basis.costs, strict=True))
        if cost is not None and not basis.excluded[at]
    }
    return min(without.values()) < without[decision.pick[0]] - 1


def _session_worker(decision: Decision) -> str | None:
    """Returns the endpoint of the conversation's worker, None if it belongs to none."""
    belonging = decision.basis.belonging
    first = next(iter(belonging.credit), belonging.home)
    return next((one.endpoint for one in decision.basis.workers if one.name == first), None)


def _prefill(decision: Decision) -> dict[str, Any] | None:
    """Returns the entry about the prefill worker; None if all workers take whole requests."""
    split = decision.split
    if split is None:
        return None
    costs = {"here": split.cost_alone, "apart": split.cost_split}
    prefill = split.prefill
    shown: dict[str, Any] = {
        "pick": None if prefill is None else prefill.pick[0],
        "why": split.reason,
        "cost": {name: None if cost is None else round(cost, 3) for name, cost in costs.items()},
    }
    if prefill is not None:
        shown["candidates"] = [
            {"endpoint": worker.endpoint, "cost": cost, "excluded": excluded or None}
            for worker, cost, excluded in zip(
                prefill.basis.workers, prefill.basis.costs, prefill.basis.excluded, strict=True
            )
        ]
    return shown


# What to do about a reason, where only the operator can.
_REMEDIES = {COMPRESSED: f"{COMPRESSED}: put Envoy's decompressor before ext_proc"}

NOT_STEERED = "not steered, so the proxy chooses; otherwise"


def reason_sentence(decision: Decision) -> str:
    """Returns the reason of a decision as a sentence."""
    words = _reason(decision)
    if decision.held_seconds:
        words += f"; it waited {decision.held_seconds:.0f} s for room"
    return words if decision.is_steered or not decision.pick else f"{NOT_STEERED} {words}"


# Why a request is refused.
_REFUSED = {
    Verdict.SHED: "every worker that may answer is over its limit of requests",
    Verdict.NO_ROOM: "live conversations fill the caches, and it has waited for as long as it may",
}


def _reason(decision: Decision) -> str:
    if decision.verdict in _REFUSED:
        return _REFUSED[decision.verdict]
    for left in (FINDS_MODEL, CALLS_NO_MODEL):
        if left in decision.basis.excluded:
            return f"{left}: {decision.reason}"
    if decision.verdict is not Verdict.STEER:
        return "no worker may answer this request"
    basis = decision.basis
    rows = zip(basis.workers, basis.costs, basis.excluded, strict=True)
    costs = {
        worker.endpoint: cost for worker, cost, why_not in rows if cost is not None and not why_not
    }
    first = decision.pick[0]
    others = decision.pick[1:] or sorted(costs.keys() - {first}, key=costs.__getitem__)
    words = f"{basis.policy}: {first} is expected to hold {_overlap_sentence(decision)}"
    if basis.policy == "cost":
        words += f", cost {costs[first]:.0f} tokens of work"
        words += f"; next is {others[0]} with {costs[others[0]]:.0f}" if others else ""
    if basis.sampled is not None:
        words += f"; {len(basis.sampled)} of {len(basis.workers)} workers were compared"
    words += _belongs(decision)
    if decision.split is not None:
        words += f"; {_who_computes(decision.split)}"
    if decision.source is not None:
        words += f"; it pulls {decision.source.tokens} tokens from {decision.source.endpoint}"
    words += "".join([f"; {said}" for said in (loading_sentence(decision),) if said])
    if basis.prompt_tokens:
        by = decided_by(decision)
        return f"{words}; {_WORDS[by]}" if by in (SPREAD, CONVERSATION) else words
    why = _REMEDIES.get(decision.reason, decision.reason)
    return f"{words}; without tokens ({why}), so {decided(decision)}"


def loading_sentence(decision: Decision) -> str:
    """Returns what the pick would load from a store, in words; "" if that did not count."""
    fetch = decision.basis.fetches.get(decision.worker)
    if fetch is None or not fetch.store or not decision.pick:
        return ""
    lately = "" if round(fetch.share, 2) >= 1 else f", of which it loaded {fetch.share:.0%} lately"
    less = f"{fetch.credit:.0f} tokens of work less"
    return f"it would load {fetch.tokens} tokens from the store {fetch.store}{lately}: {less}"


def _belongs(decision: Decision) -> str:
    """Returns where the request's conversation belongs, "" if nowhere."""
    owner = _session_worker(decision)
    if owner is None:
        return ""
    belonging, costly = decision.basis.belonging, ""
    if belonging.home and belonging.begins:
        costly = ", which no longer holds most of it"
    elif owner != decision.pick[0]:
        costly = ", which is too busy"
    return f"; {_OWNERS[belonging.by or CONVERSATION]} {owner}{costly}"


def decided(decision: Decision) -> str:
    """Returns what decided on a request without known tokens, in words; "" for any other."""
    by, basis = decided_by(decision), decision.basis
    if basis.prompt_tokens or not by:
        return ""
    if by != TEXTS:
        return _WORDS[by]
    sent, whole = basis.claims_on(decision.worker).approximate, max(1.0, basis.weighed_tokens)
    return (
        f"the record of texts decided: about {sent:.0f} of its {whole:.0f} tokens were sent there"
        f" ({min(1.0, sent / whole):.0%})"
    )


def _who_computes(split: Split) -> str:
    costs = ""
    if split.cost_alone is not None and split.cost_split is not None:
        costs = f" ({split.cost_alone:.0f} here, {split.cost_split:.0f} apart)"
    who = "it" if split.prefill is None else split.prefill.pick[0]
    return f"{who} computes the prompt: {split.reason}{costs}"


def _overlap_sentence(decision: Decision) -> str:
    basis = decision.basis
    claimed = basis.claims_on(decision.worker)
    kinds = (
        ("certain", basis.certain_tokens),
        ("uncertain", basis.uncertain_tokens),
        ("speculative", claimed.speculative),
        ("approximate", claimed.approximate),
    )
    certain, uncertain, *sent = (f"{tokens} {kind}" if tokens else "" for kind, tokens in kinds)
    # what was sent there may be what events leave uncertain, so these two are not added up
    beyond = " or ".join(filter(None, (uncertain, " + ".join(filter(None, sent)))))
    parts = [*filter(None, (certain, beyond))]
    return f"{' + '.join(parts) or 'none'} of {basis.weighed_tokens:.0f} prompt tokens"


def _candidate(basis: Basis, at: int, state: str, load: Load) -> dict[str, Any]:
    worker = basis.workers[at]
    overlaps = [each[worker.name] for each in basis.overlaps if worker.name in each]
    claimed = basis.claims_on(worker.name)
    beyond = max(0.0, basis.belonging.credit.get(worker.name, 0.0) - claimed.saved)
    terms = _terms(basis, basis.weighed_tokens - claimed.saved, load, beyond)
    added = {
        **dict.fromkeys(_CHARGED, 0.0),
        **{name: basis.charged(name, at) for name in basis.charges},
    }
    for name, tokens in added.items():
        terms[name] = round(0.0 + _CHARGED.get(name, 1) * tokens, 3)  # 0.0, not -0.0
    fetch = basis.fetches.get(worker.name)
    work = terms["uncached"] + terms["queued"] + terms["running"] - terms["session"]
    cost = work + sum(added.values())
    return {
        "endpoint": worker.endpoint,
        "name": worker.name,
        "state": state,
        "overlap_tokens": sum(overlap.certain_tokens for overlap in overlaps),
        "overlap_blocks": {
            tier.name.lower(): sum(overlap.tiers[tier] for overlap in overlaps) for tier in Tier
        },
        "uncertain_tokens": sum(overlap.uncertain_tokens for overlap in overlaps),
        "unusable_tokens": sum(overlap.unusable_tokens for overlap in overlaps),
        "speculative_tokens": claimed.speculative,
        "approximate_tokens": claimed.approximate,
        "fetch": None if fetch is None else fetch.as_json(),
        "in_flight": load.in_flight,
        "cost": round(cost, 3),
        "cost_terms": terms,
        "reported": _reported(load),
        "excluded": basis.excluded[at] or None,
    }


# The terms that are shown also where they do not concern the request, and the sign with which each
# is shown: those that lower a cost are shown as what they lower it by. Any other term is shown as
# what it adds.
_CHARGED = {CONVERSATIONS: 1, SIBLINGS: -1, PATIENCE: -1, FETCHED: -1}


def _terms(
    basis: Basis, uncached_tokens: float, load: Load, session_tokens: float
) -> dict[str, float]:
    """Returns the terms of the work that every worker has, and the parts of the first one.

    slowness: the worker's time relative to the configured one, a factor of all terms. session: the
    discount for the request's session.
    """
    slowness = load.slowness
    return {
        "uncached_tokens": round(uncached_tokens, 3),
        "slowness": round(slowness, 3),
        "uncached": round(slowness * basis.affinity * uncached_tokens, 3),
        "session": round(slowness * basis.affinity * session_tokens, 3),
        "queued": round(slowness * load.backlog_tokens, 3),
        "running": round(slowness * basis.running * (load.in_flight + load.others), 3),
    }


def _reported(load: Load) -> dict[str, Any] | None:
    report = load.report
    if report is None:
        return None
    return {
        "running": report.running,
        "waiting": report.waiting,
        "pending_tokens": report.pending_tokens,
        "cache_usage": report.cache_usage,
        "of_others": round(load.others, 3),
        "age_seconds": round(load.age_seconds, 3),
    }
