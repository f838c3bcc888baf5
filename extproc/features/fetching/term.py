"""The term of fetching: what a worker can get of a prompt's KV blocks without computing them.

It can pull them from another worker, its peer, or load them from a store that it mounts. Both count
only for what it does not hold itself, and for less than what it holds:

    a pull = tokens - (tokens + tokens that others still pull from there)
                      x prefill speed of the worker / transfer speed of the peer
    a load = tokens x worth of the store x share of such tokens that the worker loaded lately

in tokens that need not be computed, never below 0. The better of the two counts, with the weight
that an uncached token has on an idle fleet: on a busy one these tokens would delay others, but a
further copy of blocks takes the place of others. Both count only by the share by which the worker
has less to do than all that hold as much: elsewhere, the copy would relieve nobody.
"""

from collections.abc import Mapping, Sequence
from math import inf

from extproc.config.schema import Cost
from extproc.features.fetching.offers import Offers, Pullable, StoredPrefix, fetch_of
from extproc.routing.cost.fetch import FETCHED, Fetch, Peer
from extproc.routing.cost.survey import Survey
from extproc.routing.cost.term import Charge
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from extproc.routing.savings.savings import Savings
from kvstate.overlap import Overlap


def fetch_terms(
    prefill_tokens_per_second: float,
    snapshot: Snapshot,
    stores: Sequence[StoredPrefix],
    pullable: Pullable,
) -> Sequence["FetchTerm"]:
    """Returns the term of what workers could load or pull; none if that is nothing."""
    if not (stores or pullable.peers):
        return ()
    offers = Offers(prefill_tokens_per_second, pullable, stores)
    return (FetchTerm(offers, snapshot.overlaps[0], snapshot.rules.cost),)


class FetchTerm:
    """The term of a request of which workers could fetch a part.

    offers: what they could. overlaps: of its only prompt, by the worker's name. cost: the weights.
    """

    def __init__(self, offers: Offers, overlaps: Mapping[str, Overlap], cost: Cost) -> None:
        self._offers = offers
        self._overlaps = overlaps
        self._cost = cost

    def charge(self, survey: Survey, savings: Savings) -> Charge | None:
        """Returns by how much the costs of workers that can fetch are lower, and what each can."""
        rows = [
            (worker.name, survey.loads[at], self._held(worker.name, savings))
            for at, worker in enumerate(survey.workers)
        ]
        works = [work_of(load, self._cost.running_tokens) for _, load, _ in rows]
        found: dict[str, Fetch] = {}
        charged = [0.0] * len(rows)
        least: dict[int, float] = {}  # work of a worker that holds so many tokens
        for at, (name, load, tokens) in enumerate(rows):
            fetch = fetch_of(self._offers, name, tokens, load.slowness)
            if fetch.value <= 0.0:
                continue
            if fetch.peer is not None:
                share = relief(self._offers.pullable.peers, fetch.peer.tokens, works[at])
            else:
                whole = tokens + fetch.tokens
                if whole not in least:
                    holders = zip(rows, works, strict=True)
                    held = [work for row, work in holders if row[2] >= whole]
                    least[whole] = min(held, default=inf)
                share = share_of_relief(least[whole], works[at])
            if share > 0.0:
                weight = self._cost.affinity_percent / 100
                credit = weight * fetch.value * share * load.slowness
                found[name] = fetch._replace(credit=credit)
                charged[at] = -credit
        return Charge(FETCHED, charged, found) if found else None

    def _held(self, name: str, savings: Savings) -> int:
        """Returns how many tokens from the beginning a worker holds, or will."""
        overlap, claimed = self._overlaps.get(name), savings.claims_on(name)
        sent = claimed.speculative + claimed.approximate
        if overlap is None:
            return sent
        return overlap.certain_tokens + max(overlap.uncertain_tokens, sent)


def work_of(load: Load, running: float) -> float:
    """Returns what is in flight on a worker, in tokens; running: of each request."""
    return load.backlog_tokens + running * (load.in_flight + load.others)


def relief(peers: Sequence[Peer], tokens: int, work: float) -> float:
    """Returns by which share a worker has less work than all peers that hold so many tokens.

    work: the worker's own.
    """
    return share_of_relief(min(one.work for one in peers if one.tokens >= tokens), work)


def share_of_relief(least: float, work: float) -> float:
    """Returns by which share work is less than the least of others; all of it if there are none.

    least: of those, infinite if there are none.
    """
    return max(0.0, 1.0 - work / least) if least > 0.0 else 0.0
