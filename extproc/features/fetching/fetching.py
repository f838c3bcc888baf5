"""Fetching, as a feature: what workers pull from each other, where pulls are priced, or load.

Both are one feature, since a worker that could do either does what saves it more.
"""

from collections.abc import Iterable, Sequence

from prometheus_client.registry import Collector

from extproc.config.schema import Config
from extproc.features.feature import Feature
from extproc.features.fetching.offers import NOTHING_PULLABLE, Pullable
from extproc.features.fetching.pulling import Pulling, with_priced_source
from extproc.features.fetching.store_figures import StoreCollector
from extproc.features.fetching.stores import StoreOffers
from extproc.features.fetching.term import fetch_terms
from extproc.features.router_parts import RouterParts
from extproc.fleet.workers import Workers
from extproc.observing.outcomes import Outcome
from extproc.requests.request import RoutingRequest
from extproc.routing.cost.term import Term
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot


class Fetching(Feature):
    """What one router's workers fetch. Times are seconds of the loads' clock.

    stores: what workers could load, None without stores. pulling: what they could pull, None if
    pulls have no price. prefill_tokens_per_second: as configured.
    """

    def __init__(
        self,
        workers: Workers,
        stores: StoreOffers | None,
        pulling: Pulling | None,
        prefill_tokens_per_second: float,
    ) -> None:
        self._workers = workers
        self._candidates = workers.candidates
        self._stores = stores
        self._pulling = pulling
        self._prefill = prefill_tokens_per_second

    def terms(
        self, request: RoutingRequest, query: Query, snapshot: Snapshot, now: float
    ) -> Sequence[Term]:
        """Returns the credit of workers that could fetch a part of a query's only prompt."""
        stores = () if self._stores is None else self._stores.offers(query)
        pullable = self._pullable(request, query, snapshot, now)
        return fetch_terms(self._prefill, snapshot, stores, pullable)

    def _pullable(
        self, request: RoutingRequest, query: Query, snapshot: Snapshot, now: float
    ) -> Pullable:
        """Returns what could be pulled; nothing if workers take only parts of requests."""
        if self._pulling is None or self._candidates.has_roles:
            return NOTHING_PULLABLE
        return self._pulling.offers(request, query, snapshot, now)

    def dress(self, decision: Decision, request: RoutingRequest, query: Query) -> Decision:
        """Names the worker from which the pick pulls, if its price was a reason to pick it."""
        return decision if self._pulling is None else with_priced_source(decision)

    def begin(self, request: RoutingRequest, query: Query, decision: Decision, now: float) -> None:
        """Notes a pull that begins, and has its arrival looked for if it can be measured."""
        if not (decision.is_steered and decision.pick):
            return
        if query.variants:
            query = query.query_for((decision.prefill or decision).worker)
        source, prompt, worker = decision.source, query.sole, decision.worker
        pull = (
            None
            if self._pulling is None
            else self._pulling.begin_pull(decision, decision.pick[0], now)
        )
        if pull is None or prompt is None or source is None:
            return
        if self._workers.proofs.is_live(worker, query.forms):
            held = decision.basis.overlaps[0].get(worker)
            tokens = source.tokens + (0 if held is None else held.certain_tokens)
            pull.expect()
            self._workers.questions.pulls.watch(worker, prompt, tokens, pull.note_arrival)

    def note_end(
        self, decision: Decision, outcome: Outcome | None, *, is_booked: bool, is_sent: bool
    ) -> None:
        """Notes how much of what its store offered a worker loaded."""
        if outcome is None:
            return
        fetch, loaded = outcome.fetch, outcome.loaded_tokens
        if fetch is not None and loaded is not None:
            now = self._workers.monotonic()
            self._candidates.note_loaded(outcome.worker, fetch.tokens, loaded, now)

    def collectors(self) -> Iterable[Collector]:
        """Returns what shows the blocks and events of stores, if there are any."""
        if self._stores is None:
            return ()
        stored = self._workers.followed
        return (StoreCollector(stored.stores.blocks, stored.pools.events),)


def fetching(config: Config, parts: RouterParts) -> Fetching | None:
    """Returns the feature if stores are configured, or pulls that have a price."""
    stores, rules, workers = None, config.disaggregation, parts.workers
    candidates = workers.candidates
    if config.stores:
        stores = StoreOffers(
            config.stores,
            candidates.stored,
            lambda: candidates.store_shares(workers.monotonic()),
        )
    is_priced = rules.prices_pulls(has_roles=False)
    pulling = Pulling(config, parts.loads, candidates.tokens_on_host) if is_priced else None
    if stores is None and pulling is None:
        return None
    prefill = float(config.policy.cost.prefill_tokens_per_second)
    return Fetching(workers, stores, pulling, prefill)
