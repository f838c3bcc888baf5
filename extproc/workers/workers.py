"""The fleet as it is configured, found and learned: who may be picked, and what is known of it."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from extproc.accounting.causes import Circumstances
from extproc.checking.watch import SelfCheck
from extproc.config import Config
from extproc.discovery.view import STATIC, Found, Member, listed, merged
from extproc.discovery.view import Fleet as Members
from extproc.picking.decision import Worker
from extproc.workers.feed_status import feed_shown
from extproc.workers.feeds import Feeds, OpenTransports, Wanted, wanted
from extproc.workers.learning import Learning
from extproc.workers.resolving import Resolving
from kvstate.feeds.engine_load import EngineLoad
from kvstate.feeds.feed import State
from kvstate.fleet import Fleet
from kvstate.overlap import Overlap, Prompt
from kvstate.tiers import Tier

log = logging.getLogger("kvsteer.workers")


class Workers:
    """All workers.

    open_transports: opens a worker's event source, one transport a rank. checks: whether their
    tokens are ours. changed: are called after anything about who may be picked changed. gone: are
    told name and endpoint of a worker that is no more.
    """

    def __init__(self, config: Config, fleet: Fleet, open_transports: OpenTransports) -> None:
        self._config = config
        self._fleet = fleet
        self._feeds = Feeds(config, fleet, open_transports)
        self.checks = SelfCheck(fleet)
        self.changed: list[Callable[[], None]] = []
        self.gone: list[Callable[[str, str], None]] = []
        self._members: Members = merged({STATIC: listed(config.workers)})
        self._resolving = Resolving(self._members, self._note_change)
        self._learning = Learning(config.models, self._note_learned)
        self._drained: set[str] = set()
        self._following: asyncio.Task[None] | None = None
        self._candidates: dict[str, list[Worker]] = {}  # by model, until anything changes
        self._fault_of: Callable[[str], str] = lambda _: ""
        self._predictions_of: Callable[[str], dict[str, Any]] = lambda _: {}

    async def start(self) -> None:
        """Resolves names once, then keeps them resolved; follows the feeds if that is enabled."""
        self._note_change()
        await self._resolving.start()
        await self._learning.ask(self._configured())
        await self._feeds.follow(self._wanted())
        await self.enable_events(enabled=self._config.events.enabled)

    async def close(self) -> None:
        """Stops following the workers."""
        await self._resolving.close()
        await self._learning.close()
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._feeds.close()

    async def replace(self, members: Members) -> None:
        """From now on these are the workers; those that stay the same are not touched."""
        gone = [(name, self._endpoint(name)) for name in self._members if self._left(name, members)]
        self._members = members
        self._resolving.replace(members)
        there = {endpoint for _, endpoint in self._resolving.items()}
        for name, endpoint in gone:
            self._drained.discard(name)
            self.checks.forget(name)
            if name in members or endpoint not in there:  # else another name has it now
                for tell in self.gone:
                    tell(name, endpoint)
        self._note_change()
        await self._learning.ask(self._configured())
        await self._feeds.follow(self._wanted())

    def _left(self, name: str, members: Members) -> bool:
        """Whether a worker is gone from the fleet, or another engine has its address."""
        now = members.get(name)
        return now is None or now.found.identity != self._members[name].found.identity

    def show_faults(self, fault_of: Callable[[str], str]) -> None:
        """Shows with each worker what is wrong with the source that named it."""
        self._fault_of = fault_of

    def show_predictions(self, predictions_of: Callable[[str], dict[str, Any]]) -> None:
        """Shows with each worker what became of the predictions for it."""
        self._predictions_of = predictions_of

    def circumstances(self, name: str) -> Circumstances:
        """What may explain that a prediction for a worker did not come true."""
        member = self._members.get(name)
        return Circumstances(
            self.state(name),
            tokens_differ=self.checks.status(name)["differs"],
            block_size=1 if member is None else self._block_size(name, member.found),
        )

    def drain(self, name: str, *, draining: bool) -> bool:
        """Gives a worker no new requests, or gives it some again; whether it is there.

        name: its configured name, or its ip:port.
        """
        names = [one for one in self._members if name in (one, self._endpoint(one))]
        for one in names:
            (self._drained.add if draining else self._drained.discard)(one)
            log.info("worker %s: %s", one, "drains" if draining else "gets requests again")
        self._note_change()
        return bool(names)

    async def enable_events(self, *, enabled: bool) -> None:
        """The kill switch: without events every worker is as one that publishes none."""
        await self._feeds.enable(enabled=enabled)

    @property
    def events_enabled(self) -> bool:
        """Whether the workers' events are followed."""
        return self._feeds.enabled

    def overlaps(self, prompt: Prompt) -> Mapping[str, Overlap]:
        """The overlap of every worker that holds the prompt's first block, by name."""
        return self._fleet.overlaps(prompt)

    def candidates(self, model: str) -> list[Worker]:
        """Every worker as a candidate for requests to a model."""
        known = self._candidates.get(model)
        if known is None:
            listing = {name for name in self._members if self._learning.of(name).adapters}
            is_listed = any(self.model_of(name) == model for name in listing)
            known = [self._candidate(name, model, is_listed=is_listed) for name in self._members]
            self._candidates[model] = known
        return known

    def endpoints(self, model: str) -> list[str]:
        """ip:port of the workers that serve a model now."""
        return [one.endpoint for one in self.candidates(model) if not one.excluded]

    def places(self) -> list[tuple[str, str]]:
        """Name and ip:port of every worker that has one now."""
        return self._resolving.items()

    def loads(self, name: str) -> list[tuple[EngineLoad, float]]:
        """What a worker's feeds said last of its load, each with its age in seconds."""
        said = self._fleet.loads(name)
        return [(one.load, one.age_seconds) for one in said if one is not None]

    def model_of(self, name: str) -> str | None:
        """The model that a worker serves; None while that is not known."""
        model = self._members[name].found.worker.model or self._learning.of(name).model
        only = self._config.models[0].name if len(self._config.models) == 1 else None
        return model or only

    def is_draining(self, name: str) -> bool:
        """Whether a worker gets no new requests: by the operator, or as it was found."""
        return name in self._drained or self._members[name].found.worker.draining

    def draining(self) -> set[str]:
        """The endpoints of the workers that get no new requests."""
        return {self._endpoint(name) for name in self._members if self.is_draining(name)}

    def lanes(self) -> dict[str, list[tuple[str, bool]]]:
        """By model, ip:port of each worker, and whether it takes new requests."""
        lanes: dict[str, list[tuple[str, bool]]] = {}
        for name, endpoint in self._resolving.items():
            is_open = not (self.is_draining(name) or self.why_unready(name))
            lanes.setdefault(self.model_of(name) or "", []).append((endpoint, is_open))
        return lanes

    def why_unready(self, name: str) -> str:
        """Why its source says that a worker takes no requests now, "" if it takes them."""
        return self._members[name].found.excluded

    def state(self, name: str) -> str:
        """The state of a worker's feeds."""
        return self._fleet.state(name).value

    def index_bytes(self) -> int:
        """Memory of the block index."""
        return self._fleet.index_bytes()

    def replays_done(self) -> bool:
        """Whether no feed waits for its publisher or catches up with it."""
        states = {self._fleet.state(name) for name in self._members}
        return states.isdisjoint((State.CONNECTING, State.REPLAYING))

    def status(self, in_flight: Callable[[str], int]) -> list[dict[str, Any]]:
        """The answer of GET /workers."""
        return [self._status(name, member, in_flight) for name, member in self._members.items()]

    def fills(self, in_flight: Callable[[str], int]) -> Iterator[tuple[str, int, int]]:
        """Name, requests in flight and blocks, of one worker after the other."""
        for name in list(self._members):
            blocks = sum(self._fleet.blocks_by_tier(name))
            yield name, in_flight(self._endpoint(name)), blocks

    def _status(self, name: str, member: Member, in_flight: Callable[[str], int]) -> dict[str, Any]:
        endpoint = self._endpoint(name)
        tiers = self._fleet.blocks_by_tier(name)
        adapters = self._adapters(name, is_listed=True)
        return {
            "endpoint": endpoint,
            "name": name,
            "model": self.model_of(name) or "",
            "state": self.state(name),
            "reason": self._feeds.reason(name),
            "block_size": self._block_size(name, member.found),
            "feeds": [feed_shown(status) for status in self._fleet.feeds(name)],
            "blocks_by_tier": {
                tier.name.lower(): count for tier, count in zip(Tier, tiers, strict=True)
            },
            "in_flight": in_flight(endpoint),
            "tokens": self.checks.status(name),
            "predictions": self._predictions_of(name),
            "lora": None if adapters is None else sorted(adapters),
            "draining": self.is_draining(name),
            "excluded": self.why_unready(name),
            "source": member.source,
            "source_fault": self._fault_of(member.source),
        }

    def _candidate(self, name: str, model: str, *, is_listed: bool) -> Worker:
        endpoint = self._resolving.endpoint(name)
        excluded = self.why_unready(name)
        serves = self.model_of(name)
        if serves != model:
            excluded = f"serves {serves}" if serves else "its model is not known yet"
        elif endpoint is None:
            excluded = "its host name could not be resolved"
        return Worker(name, endpoint or name, excluded, self._adapters(name, is_listed=is_listed))

    def _adapters(self, name: str, *, is_listed: bool) -> frozenset[str] | None:
        """The adapters that a worker serves; None for all of its model's.

        is_listed: whether any worker of the model lists adapters. Where none does, a list without
        adapters says nothing: some engines list models only.
        """
        given = self._members[name].found.worker.lora
        if given:
            return frozenset(given)
        told = self._learning.of(name).adapters
        return told if told or is_listed else None

    def _block_size(self, name: str, found: Found) -> int:
        return (
            self._fleet.block_size(name)
            or found.worker.block_size
            or self._learning.of(name).block_size
            or self._config.policy.block_size
        )

    def _endpoint(self, name: str) -> str:
        return self._resolving.endpoint(name) or name

    def _configured(self) -> Mapping[str, Any]:
        return {name: member.found.worker for name, member in self._members.items()}

    def _wanted(self) -> dict[str, Wanted]:
        """The feeds to be followed; of a worker whose model is not known, none yet."""
        known = [(name, one.found, self.model_of(name)) for name, one in self._members.items()]
        feeds = wanted((name, found.worker, model) for name, found, model in known if model)
        return {
            name: one._replace(
                identity=self._members[name].found.identity,
                adapters=self._members[name].found.adapters,
            )
            for name, one in feeds.items()
        }

    def _note_learned(self, _: str) -> None:
        """A worker's feed can be followed once its model is known."""
        self._note_change()
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow_as_learned())

    async def _follow_as_learned(self) -> None:
        wanted_now: dict[str, Wanted] | None = None
        while wanted_now != self._wanted():
            wanted_now = self._wanted()
            await self._feeds.follow(wanted_now)

    def _note_change(self) -> None:
        self._candidates.clear()
        for tell in self.changed:
            tell()
