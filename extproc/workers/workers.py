"""The fleet as the rest of the router sees it: who may be picked, and what each worker holds."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from extproc.checking.watch import SelfCheck
from extproc.config import Config
from extproc.discovery.view import Fleet as Members
from extproc.discovery.view import Member
from extproc.observing.outcomes import Circumstances, Outcome
from extproc.picking.eligibility import Worker
from extproc.workers.feeds import Feeds, OpenTransports, Wanted, feed_shown
from extproc.workers.roster import Roster
from kvstate.events import EngineLoad
from kvstate.feeds.feed import State
from kvstate.fleet import Fleet
from kvstate.overlap import Overlap, Prompt
from kvstate.tiers import Tier

log = logging.getLogger("kvsteer.workers")


class Workers:
    """All workers.

    open_transports: opens a worker's event source, one transport a rank. checks: whether their
    tokens are ours. changed: are called after anything about who may be picked changed. gone: are
    told name and endpoint of a worker that is no more, or is elsewhere now.
    """

    def __init__(self, config: Config, fleet: Fleet, open_transports: OpenTransports) -> None:
        self._config = config
        self._fleet = fleet
        self._feeds = Feeds(config, fleet, open_transports)
        self.checks = SelfCheck(fleet)
        self.changed: list[Callable[[], None]] = []
        self.gone: list[Callable[[str, str], None]] = []
        self._roster = Roster(config, self._note_moved, self._note_learned)
        self._following: asyncio.Task[None] | None = None
        self._candidates: dict[str, list[Worker]] = {}  # by model, until anything changes
        self._block_sizes: dict[str, int] = {}  # without events, until anything changes
        self._fault_of: Callable[[str], str] = lambda _: ""
        self._down_of: Callable[[str], str] = lambda _: ""
        self._astray_of: Callable[[str, str], str] = lambda *_: ""
        self._predictions_of: Callable[[str], dict[str, Any]] = lambda _: {}

    async def start(self) -> None:
        """Resolves names once, then keeps them resolved; follows the feeds if that is enabled."""
        self._note_change()
        await self._roster.start()
        await self._feeds.follow(self._roster.wanted_feeds())
        await self.enable_events(enabled=self._config.events.enabled)

    async def close(self) -> None:
        """Stops following the workers."""
        await self._roster.close()
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._feeds.close()

    async def replace(self, members: Members) -> None:
        """From now on these are the workers; those that stay the same are not touched."""
        gone = self._roster.replace(members)
        there = {endpoint for _, endpoint in self.places()}
        for name, endpoint in gone:
            self.checks.forget(name)
            if name in members or endpoint not in there:  # else another name has it now
                self._tell_gone(name, endpoint)
        self._note_change()
        await self._roster.ask()
        await self._feeds.follow(self._roster.wanted_feeds())

    def show_faults(self, fault_of: Callable[[str], str]) -> None:
        """Shows with each worker what is wrong with the source that named it."""
        self._fault_of = fault_of

    def show_down(
        self,
        down_of: Callable[[str], str],
        astray_of: Callable[[str, str], str] = lambda *_: "",
    ) -> None:
        """Shows with each worker why it is taken for down, and why others answer in its place.

        down_of: by its endpoint; "" while it is not. astray_of: by its name and endpoint.
        """
        self._down_of = down_of
        self._astray_of = astray_of

    def show_predictions(self, predictions_of: Callable[[str], dict[str, Any]]) -> None:
        """Shows with each worker what became of the predictions for it."""
        self._predictions_of = predictions_of

    def circumstances(self, outcome: Outcome) -> Circumstances:
        """What may explain that a prediction for a worker did not come true."""
        name, prompt = outcome.worker, outcome.prompt
        return Circumstances(
            self.state(name),
            tokens_differ=self.checks.status(name)["differs"],
            block_size=self.block_size(name),
            ranks=self._fleet.ranks(name),
            held={} if prompt is None else self._fleet.overlaps(prompt),
        )

    def drain(self, name: str, *, draining: bool) -> bool:
        """Gives a worker no new requests, or gives it some again; whether it is there.

        name: its configured name, or its ip:port.
        """
        names = self._roster.drain(name, draining=draining)
        for one in names:
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
            known = self._candidates[model] = self._roster.candidates(model)
        return known

    def endpoints(self, model: str) -> list[str]:
        """ip:port of the workers that serve a model now."""
        return [one.endpoint for one in self.candidates(model) if not one.excluded]

    def names(self) -> set[str]:
        """The names of all workers."""
        return set(self._roster.members)

    def places(self) -> list[tuple[str, str]]:
        """Name and ip:port of every worker that has one now."""
        return self._roster.places()

    def loads(self, name: str) -> list[tuple[EngineLoad, float]]:
        """What a worker's feeds said last of its load, each with its age in seconds."""
        said = self._fleet.loads(name)
        return [(one.load, one.age_seconds) for one in said if one is not None]

    def model_of(self, name: str) -> str | None:
        """The model that a worker serves; None while that is not known."""
        return self._roster.model_of(name)

    def draining(self) -> set[str]:
        """The endpoints of the workers that get no new requests."""
        roster = self._roster
        return {roster.endpoint(name) for name in roster.members if roster.is_draining(name)}

    def lanes(self) -> dict[str, list[tuple[str, bool]]]:
        """By model, ip:port of each worker, and whether it takes new requests."""
        return self._roster.lanes()

    def unplaced(self) -> set[str] | None:
        """ip:port of the workers whose model is not known yet; None while one has no address."""
        return self._roster.unplaced()

    def state(self, name: str) -> str:
        """The state of a worker's feeds."""
        return self._fleet.state(name).value

    def sign_of_life(self, name: str) -> tuple[bool, int]:
        """Whether a worker's feed has no connection, and how many batches came of it so far."""
        is_cut = self._fleet.state(name) in (State.STALE, State.CONNECTING)
        return is_cut, self._fleet.batches(name)

    def index_bytes(self) -> int:
        """Memory of the block index."""
        return self._fleet.index_bytes()

    def replays_done(self) -> bool:
        """Whether no feed waits for its publisher or catches up with it."""
        states = {self._fleet.state(name) for name in self._roster.members}
        return states.isdisjoint((State.CONNECTING, State.REPLAYING))

    def status(self, in_flight: Callable[[str], int]) -> list[dict[str, Any]]:
        """The answer of GET /workers, at one moment."""
        return list(self.statuses(in_flight))

    def statuses(self, in_flight: Callable[[str], int]) -> Iterator[dict[str, Any]]:
        """The same, of one worker after the other: each is looked at when it is asked for.

        A worker that goes meanwhile is left out, and so is one that comes.
        """
        for name in list(self._roster.members):
            member = self._roster.members.get(name)
            if member is not None:
                yield self._status(name, member, in_flight)

    def fills(self, in_flight: Callable[[str], int]) -> Iterator[tuple[str, int, int]]:
        """Name, requests in flight and blocks, of one worker after the other."""
        for name in list(self._roster.members):
            blocks = sum(self._fleet.blocks_by_tier(name))
            yield name, in_flight(self._roster.endpoint(name)), blocks

    def _status(self, name: str, member: Member, in_flight: Callable[[str], int]) -> dict[str, Any]:
        roster = self._roster
        endpoint = roster.endpoint(name)
        tiers = self._fleet.blocks_by_tier(name)
        adapters = roster.adapters(name, is_listed=True)
        return {
            "endpoint": endpoint,
            "name": name,
            "model": self.model_of(name) or "",
            "state": self.state(name),
            "reason": self._reason(name),
            "block_size": self.block_size(name),
            "feeds": [feed_shown(status) for status in self._fleet.feeds(name)],
            "blocks_by_tier": {
                tier.name.lower(): count for tier, count in zip(Tier, tiers, strict=True)
            },
            "in_flight": in_flight(endpoint),
            "tokens": self.checks.status(name),
            "predictions": self._predictions_of(name),
            "lora": None if adapters is None else sorted(adapters),
            "draining": roster.is_draining(name),
            "down": self._down_of(endpoint),
            "astray": self._astray_of(name, endpoint),
            "excluded": member.found.excluded,
            "source": member.source,
            "source_fault": self._fault_of(member.source),
        }

    def _reason(self, name: str) -> str:
        """Why a worker has no feed, "" if it has."""
        if self.events_enabled and self.model_of(name) is None:
            return "its model is not known yet"
        return self._feeds.reason(name)

    def block_size(self, name: str) -> int:
        """Tokens in a worker's block: as its events tell, else as configured, else as it tells."""
        learned = self._fleet.block_size(name)
        if learned is not None:
            return learned
        size = self._block_sizes.get(name)  # it is asked for at every pick
        if size is None:
            size = self._roster.block_size(name) if name in self._roster.members else 1
            self._block_sizes[name] = size
        return size

    def _note_learned(self) -> None:
        """A worker's feed can be followed once its model is known."""
        self._note_change()
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow_as_learned())

    async def _follow_as_learned(self) -> None:
        wanted_now: dict[str, Wanted] | None = None
        while wanted_now != self._roster.wanted_feeds():
            wanted_now = self._roster.wanted_feeds()
            await self._feeds.follow(wanted_now)

    def _tell_gone(self, name: str, endpoint: str) -> None:
        for tell in self.gone:
            tell(name, endpoint)

    def _note_moved(self, name: str, before: str | None) -> None:
        """A worker has another address: what has to do with the one before is over."""
        there = {endpoint for _, endpoint in self.places()}
        if before is not None and before not in there:
            self._tell_gone(name, before)
        self._note_change()

    def _note_change(self) -> None:
        self._candidates.clear()
        self._block_sizes.clear()
        for tell in self.changed:
            tell()
