"""What the operator and the metrics see of each worker."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from extproc.fleet.candidates import Candidates, adapters_of
from extproc.fleet.engine_knowledge import EngineKnowledge
from extproc.fleet.feeds.feeds import Feeds, feed_as_json
from extproc.fleet.records.shared import SharedByFleet
from extproc.fleet.records.worker import Worker
from extproc.fleet.strays import Strays
from extproc.observing.outcomes import (
    BLOCKS,
    FORM,
    RANK,
    TOKEN_MISMATCH,
    Circumstances,
    Outcome,
    likely_cause,
)
from extproc.proof.trust import SILENT
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.load.loads import Load
from kvstate.feeds.feed import FeedState
from kvstate.overlap import Tier


class States:
    """The state of every worker, and what its requests' outcomes are compared with.

    records: by name. source_fault: returns what is wrong with a source of workers, by its name; ""
    if nothing is.
    """

    def __init__(
        self,
        shared: SharedByFleet,
        candidates: Candidates,
        engines: EngineKnowledge,
        feeds: Feeds,
        strays: Strays,
        source_fault: Callable[[str], str],
    ) -> None:
        self._transfer_rules = shared.config.disaggregation
        self.records: Mapping[str, Worker] = shared.table.by_name
        self._table = shared.table
        self._fleet = shared.followed
        self._candidates = candidates
        self._loads = candidates.loads
        self._proofs = engines.proofs
        self._pins = candidates.pins
        self._reuse = engines.reuse
        self._strays = strays
        self._feeds = feeds
        self._source_fault = source_fault
        self._monotonic = shared.monotonic

    def statuses(self) -> Iterator[dict[str, Any]]:
        """Yields the answer of GET /workers, each worker as it is when it is reached.

        Workers that are added or removed meanwhile are left out.
        """
        for name in list(self.records):
            worker = self.records.get(name)
            if worker is not None:
                yield self._status(worker)

    def _status(self, worker: Worker) -> dict[str, Any]:
        name, endpoint = worker.name, worker.endpoint
        candidates = self._candidates
        tiers, share = self._fleet.blocks.by_tier(name), worker.store_share
        adapters = adapters_of(worker, is_listed=True)
        disbelieved, why = self._proofs.disbelief(name)
        return {
            "endpoint": endpoint,
            "name": name,
            "other_endpoints": worker.other_endpoints,
            "model": candidates.model_of(worker) or "",
            "state": disbelieved or candidates.state(name),
            "reason": self._reason(worker),
            "block_size": candidates.block_size(name),
            "feeds": [feed_as_json(status, why) for status in self._fleet.feeds.statuses(name)],
            "blocks_by_tier": {
                tier.name.lower(): count for tier, count in zip(Tier, tiers, strict=True)
            },
            "in_flight": self._loads.in_flight(endpoint),
            "contexts": _contexts(worker.holdings, self._monotonic()),
            "speed": self._loads.speed_as_json(endpoint),
            **worker.identity.as_json(),
            "transfers": self._transfers(endpoint),
            "store": self._fleet.stores.mounted_by(name),
            "store_share": None if share is None else share.as_json(self._monotonic()),
            "tokens": self._proofs.status(name),
            "pins": self._pins.as_json(worker),
            "reuse": self._reuse.as_json(worker),
            "predictions": worker.outcomes.drift.as_json(),
            "lora": None if adapters is None else sorted(adapters),
            "role": worker.sighting.worker.role,
            "failed_halves": worker.upstream.failed_halves if worker.upstream else 0,
            "draining": worker.is_draining,
            "saved_tokens": worker.saved.total(self._monotonic()),
            "down": self.down(endpoint),
            "astray": self._strays.cause(name),
            "excluded": worker.sighting.excluded,
            "source": worker.member.source,
            "source_fault": self._source_fault(worker.member.source),
        }

    def _transfers(self, endpoint: str) -> dict[str, int] | None:
        """Returns what others pull from a worker, None if pulls are not priced."""
        rules = self._transfer_rules
        if not rules.price_pulls:
            return None
        now, configured = self._monotonic(), float(rules.transfer_tokens_per_second)
        assumed = self._loads.fleet_transfers.speed(configured, now)
        return self._loads.transfers(endpoint).as_json(assumed, now)

    def _reason(self, worker: Worker) -> str:
        """Returns why a worker has no feed, "" if it has one."""
        if self._feeds.enabled and self._candidates.model_of(worker) is None:
            return "its model is not known yet"
        return self._feeds.reason(worker)

    def saved_by_pod(self) -> Iterator[tuple[str, int]]:
        """Yields the pod of each worker that has one, and what its cache saved in the last hour."""
        now = self._monotonic()
        for worker in list(self._table):
            if worker.sighting.pod:
                yield worker.sighting.pod, worker.saved.total(now)

    def fills(self) -> Iterator[tuple[str, int, int]]:
        """Yields the name, requests in flight and blocks of one worker after the other."""
        for worker in list(self._table):
            blocks = sum(self._fleet.blocks.by_tier(worker.name))
            yield worker.name, self._loads.in_flight(worker.endpoint), blocks

    def replays_done(self) -> bool:
        """Returns whether no feed is connecting or replaying."""
        states = {self._fleet.feeds.state(name) for name in self.records}
        return states.isdisjoint((FeedState.CONNECTING, FeedState.REPLAYING))

    def index_bytes(self) -> int:
        """Returns the memory of the block index."""
        return self._fleet.index.memory()

    def tokens_per_second(self, name: str) -> float:
        """Returns how many prompt tokens a worker computes in a second; 0 if it is unknown."""
        worker = self.records.get(name)
        return 0.0 if worker is None else self._loads.tokens_per_second(worker.endpoint)

    def load(self, endpoint: str) -> Load:
        """Returns the current load of an endpoint."""
        return self._loads.load(endpoint, self._monotonic())

    def down(self, endpoint: str) -> str:
        """Returns why an endpoint is down, "" if it is not."""
        return self._table.upstreams.reason(endpoint, self._monotonic())

    def circumstances(self, outcome: Outcome) -> Circumstances:
        """Returns facts that may explain a wrong prediction for a worker."""
        name, prompt = outcome.worker, outcome.prompt
        return Circumstances(
            SILENT if self._proofs.silence(name) else self._candidates.state(name),
            tokens_differ=self._proofs.differs(name),
            block_size=self._candidates.block_size(name),
            ranks=self._fleet.feeds.ranks(name),
            overlaps={} if prompt is None else self._fleet.blocks.overlaps(prompt),
            reuse_cause=self._reuse.cause(outcome),
            uncertain_because=self._uncertain_because(outcome),
        )

    def _uncertain_because(self, outcome: Outcome) -> str:
        """Returns why a worker's credit for a request is uncertain, if it is."""
        if not self._proofs.is_certain(outcome.worker, outcome.forms):
            return FORM
        of_engine = self._reuse.uncertain_because(outcome.worker)
        is_any_rank = self._fleet.feeds.ranks(outcome.worker) > 1 and not outcome.names_rank
        return of_engine or (RANK if is_any_rank else BLOCKS)

    def note_usage(self, outcome: Outcome, known: Callable[[], Circumstances]) -> None:
        """Compares how many tokens an engine counted, and reused, with what is known here.

        known: returns the circumstances of the outcome.
        """
        counted = outcome.counted_tokens
        if counted is not None:
            self._proofs.counted(outcome.worker, outcome.forms, outcome.prompt_tokens, counted)
        self._reuse.note_outcome(outcome)
        self._note_prediction(outcome, known)

    def _note_prediction(self, outcome: Outcome, known: Callable[[], Circumstances]) -> None:
        """Compares what the worker held by its feed, certain or not, with what it reused."""
        cached = outcome.reported.cached_tokens
        if outcome.error_tokens is None or cached is None:
            return
        overlap, cause = outcome.overlaps.get(outcome.worker), ""
        held = 0 if overlap is None else overlap.certain_tokens + overlap.uncertain_tokens
        if held != cached:
            cause = likely_cause(outcome._replace(predicted_tokens=held), known())
        if cause == TOKEN_MISMATCH and self._proofs.differs(outcome.worker):
            return  # it is known of these forms, and others may be right
        self._proofs.predicted(outcome.worker, cause)


def _contexts(holdings: Holdings, now: float) -> dict[str, int | None]:
    """Returns what live conversations hold of a worker's cache, and its size if that is known."""
    live = holdings.contexts
    live.expire(now)
    return {
        "conversations": round(live.conversations),
        "live_tokens": round(live.tokens),
        "cache_tokens": holdings.capacity_tokens,
    }
