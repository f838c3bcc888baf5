"""The fleet as a picker sees it: who may be picked, and what each worker holds."""

import asyncio
from collections.abc import Iterable, Mapping

from extproc.base.engine import Engine, changes_prompts
from extproc.config.schema import Config
from extproc.config.sections import BOTH
from extproc.fleet.feeds.rank_pins import RankPins
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker
from extproc.requests.dialect import Dialect, ModelDialects, model_dialects
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.candidates.pins import RankChoice
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.load.loads import Loads
from extproc.routing.store_share import StoreShare
from extproc.tokenizing.remote_tokenizer import Failures
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap, Prompt, Tier
from kvstate.stores.stores import StoredTokens


class Candidates:
    """Every worker as a candidate for requests to a model.

    upstreams: the records of the workers' endpoints. loads: their load. pins: the ranks that
    requests name to them.
    """

    def __init__(
        self,
        config: Config,
        table: Table,
        fleet: FollowedWorkers,
        loads: Loads,
        pins: RankPins,
    ) -> None:
        self.pins = pins
        self._config = config
        self._table = table
        self._fleet = fleet
        self._blocks = fleet.blocks
        self._feeds = fleet.feeds
        self.upstreams = table.upstreams
        self.loads = loads
        self._changed = asyncio.Event()
        self._by_model: dict[str, list[Candidate]] = {}  # until anything changes
        self._dialects: dict[str, ModelDialects] = {}  # by model, until anything changes
        self._draining: set[str] | None = None  # until anything changes
        self._has_roles: bool | None = None  # until anything changes

    def list_for(self, model: str) -> list[Candidate]:
        """Returns every worker as a candidate for requests to a model."""
        known = self._by_model.get(model)
        if known is None:
            is_listed = any(
                worker.self_report.adapters and self.model_of(worker) == model
                for worker in self._table
            )
            known = self._by_model[model] = [
                self._candidate(worker, model, is_listed=is_listed) for worker in self._table
            ]
        return known

    def dialects_of(self, model: str) -> ModelDialects:
        """Returns the dialects that the engines of a model's workers speak."""
        known = self._dialects.get(model)
        if known is None:
            workers = [one for one in self._table if self.model_of(one) == model]
            settings = next((one for one in self._config.models if one.name == model), None)
            is_given = settings is not None and settings.chat_template is not None
            keywords = (settings and settings.chat_template_kwargs) or {}
            own = {
                one.name
                for one in workers
                if changes_prompts(one.identity.arguments, is_given=is_given)
            }
            arguments = {
                one.name: one.identity.arguments for one in workers if one.identity.arguments
            }
            engines = {one.name: one.engine for one in workers}
            printed = {one.name: one.printed for one in workers if one.printed is not None}
            known = self._dialects[model] = model_dialects(
                engines, own, arguments, printed, keywords
            )
        return known

    def dialect_of(self, worker: Worker) -> Dialect | None:
        """Returns the dialect that a worker speaks, None while its engine or model is unknown."""
        model = self.model_of(worker)
        if worker.engine is None or model is None:
            return None
        dialects = self.dialects_of(model)
        others = (dialect for dialect, workers in dialects.rest if worker.name in workers)
        return next(others, dialects.first)

    def _candidate(self, worker: Worker, model: str, *, is_listed: bool) -> Candidate:
        excluded = worker.sighting.excluded
        serves = self.model_of(worker)
        if serves != model:
            excluded = f"serves {serves}" if serves else "its model is not known yet"
        elif worker.upstream is None:
            excluded = "its host name could not be resolved"
        adapters = adapters_of(worker, is_listed=is_listed)
        given = worker.sighting.worker
        return Candidate(
            worker.name, worker.endpoint, excluded, adapters, given.role, given.transfer_port
        )

    def model_of(self, worker: Worker) -> str | None:
        """Returns the model that a worker serves; None while it is unknown."""
        model = worker.sighting.worker.model or worker.self_report.model
        only = self._config.models[0].name if len(self._config.models) == 1 else None
        return model or only

    @property
    def has_roles(self) -> bool:
        """Whether any worker takes only a part of requests."""
        if self._has_roles is None:
            self._has_roles = any(one.sighting.worker.role != BOTH for one in self._table)
        return self._has_roles

    def draining(self) -> set[str]:
        """Returns the endpoints of the workers that get no new requests."""
        if self._draining is None:
            self._draining = {one.endpoint for one in self._table if one.is_draining}
        return self._draining

    def endpoints(self, model: str) -> list[str]:
        """Returns ip:port of the workers that serve a model now."""
        return [one.endpoint for one in self.list_for(model) if not one.excluded]

    def tokenizers(self, model: str) -> dict[str, Failures]:
        """Returns the failures to tokenize of the workers that serve a model now, by ip:port."""
        records = self._table.by_name
        return {
            one.endpoint: records[one.name].tokenizer
            for one in self.list_for(model)
            if not one.excluded
        }

    def places(self) -> list[tuple[str, str]]:
        """Returns name and ip:port of every worker that has an address now."""
        return [(one.name, one.endpoint) for one in self._table if one.upstream is not None]

    def overlaps(self, prompt: Prompt) -> Mapping[str, Overlap]:
        """Returns the overlap of every worker that holds the prompt's first block, by name."""
        return self._blocks.overlaps(prompt)

    def tokens_on_host(self, prompt: Prompt) -> Mapping[str, int]:
        """Returns how many first tokens of a prompt each worker has in host memory, by name."""
        return self._blocks.tokens_on(prompt, Tier.HOST)

    def stored(self, prompt: Prompt) -> Iterable[StoredTokens]:
        """Returns what each store has of a prompt, and the workers that mount it."""
        return self._fleet.stores.stored(prompt)

    def holdings(self, name: str) -> Holdings:
        """Returns the record of what was sent to a worker; an unused one if it was removed."""
        worker = self._table.get(name)
        return Holdings(name) if worker is None else worker.holdings

    def endpoint(self, name: str) -> str:
        """Returns a worker's ip:port, "" for an unknown worker."""
        worker = self._table.get(name)
        return "" if worker is None else worker.endpoint

    def state(self, name: str) -> str:
        """Returns the state of a worker's feeds."""
        return self._feeds.state(name).value

    def ranks(self, name: str) -> int:
        """Returns how many ranks a worker has; 0 if unknown."""
        return self._feeds.ranks(name)

    @property
    def names_ranks(self) -> bool:
        """Whether requests may name the rank that computes them."""
        return self._blocks.names_ranks

    def rank_choice(self, name: str, path: str, *, writes_body: bool) -> RankChoice:
        """Returns how a request on a path may name a rank of a worker.

        writes_body: whether the request's body may be changed.
        """
        return self.pins.choice(name, path, writes_body=writes_body)

    def note_saved(self, name: str, tokens: int, now: float) -> None:
        """Notes that a worker's cache saves so many tokens of a request sent to it."""
        worker = self._table.get(name)
        if worker is not None:
            worker.saved.note(tokens, now)

    def note_loaded(self, name: str, offered: int, loaded: int, now: float) -> None:
        """Notes how many of the tokens that a store had for it a worker loaded."""
        worker = self._table.get(name)
        if worker is not None:
            worker.store_share = worker.store_share or StoreShare()
            worker.store_share.note(offered, loaded, now)

    def store_shares(self, now: float) -> Mapping[str, float]:
        """Returns what share of the tokens that stores offered workers loaded, if it is known."""
        return {
            one.name: one.store_share.share(now)
            for one in self._table
            if one.store_share is not None
        }

    def engine(self, name: str) -> Engine | None:
        """Returns the engine that a worker runs; None if that, or the worker, is unknown."""
        worker = self._table.get(name)
        return None if worker is None else worker.engine

    def engines_of(self, model: str) -> set[str]:
        """Returns the names of the engines that a model's workers run, as far as they are known."""
        workers = [one for one in self._table if self.model_of(one) == model]
        return {one.engine.name for one in workers if one.engine is not None}

    def engines(self) -> list[Engine | None]:
        """Returns the engine of each worker, None for one that is not known."""
        return [one.engine for one in self._table]

    def block_size(self, name: str) -> int:
        """Returns the tokens in a worker's block: by its events, else as configured or reported."""
        announced = self._blocks.block_size(name)
        if announced is not None:
            return announced
        worker = self._table.get(name)
        if worker is None:
            return 1
        given = worker.sighting.worker.block_size or worker.self_report.block_size
        return given or worker.engine_answer.block_size or self._config.policy.block_size

    def next_change(self) -> asyncio.Event:
        """Returns an event that is set at the next change of candidates; get it before reading."""
        return self._changed

    def note_change(self) -> None:
        """Notes that a worker came, went, moved, drains, or said what it serves or runs."""
        self._by_model.clear()
        self._dialects.clear()
        self._draining = self._has_roles = None
        self._changed.set()
        self._changed = asyncio.Event()


def adapters_of(worker: Worker, *, is_listed: bool) -> frozenset[str] | None:
    """Returns the adapters that a worker serves; None for all of its model's.

    is_listed: whether any worker of the model lists adapters. If none does, a list without adapters
    means nothing: some engines list only models.
    """
    given = worker.sighting.worker.lora
    if given is not None:
        return frozenset(given)
    reported = worker.self_report.adapters
    return reported if reported or is_listed else None
