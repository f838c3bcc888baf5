"""The workers as configured: their addresses, kept resolved, and their feeds."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from extproc import address
from extproc import config as configuration
from extproc.address import Address
from extproc.checking.watch import SelfCheck
from extproc.config import Config
from extproc.picking.decision import Worker
from extproc.workers.feeds import Feeds, OpenTransports
from kvstate.feeds.engine_load import EngineLoad
from kvstate.feeds.feed import State
from kvstate.fleet import FeedStatus, Fleet, ReportedLoad
from kvstate.overlap import Overlap, Prompt
from kvstate.tiers import Tier

log = logging.getLogger("kvsteer.workers")

# Host names are looked up again so often; Envoy's own DNS clusters do it every 5 s.
RESOLVE_INTERVAL_SECONDS = 5.0

# How long start-up waits for the first answers; a resolver that is away must not hold it up.
FIRST_RESOLVE_SECONDS = 2.0


class Workers:
    """All workers.

    open_transports: opens a worker's event source, one transport a rank. checks: whether their
    tokens are ours.
    """

    def __init__(self, config: Config, fleet: Fleet, open_transports: OpenTransports) -> None:
        self._config = config
        self._fleet = fleet
        self._feeds = Feeds(config, fleet, open_transports)
        self.checks = SelfCheck(fleet)
        self._places = {
            worker.endpoint: address.parse(worker.endpoint) for worker in config.workers
        }
        self._endpoints = {name: str(place) for name, place in self._places.items() if place.is_ip}
        self._candidates: dict[str, list[Worker]] = {}  # by model, until an address changes
        self._resolving: asyncio.Task[None] | None = None
        self._resolved_once = asyncio.Event()

    async def start(self) -> None:
        """Resolves names once, then keeps them resolved; follows the feeds if that is enabled."""
        if not all(place.is_ip for place in self._places.values()):
            self._resolving = asyncio.create_task(self._keep_resolved())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._resolved_once.wait(), FIRST_RESOLVE_SECONDS)
        await self.enable_events(enabled=self._config.events.enabled)

    async def close(self) -> None:
        """Stops following the workers."""
        if self._resolving is not None:
            self._resolving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._resolving
        await self._feeds.close()

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
            known = [self._candidate(worker, model) for worker in self._config.workers]
            self._candidates[model] = known
        return known

    def endpoints(self, model: str) -> list[str]:
        """ip:port of the workers that serve a model now."""
        return [one.endpoint for one in self.candidates(model) if not one.excluded]

    def places(self) -> list[tuple[str, str]]:
        """Name and ip:port of every worker that has one now."""
        return list(self._endpoints.items())

    def loads(self, name: str) -> list[tuple[EngineLoad, float]]:
        """What a worker's feeds said last of its load, each with its age in seconds."""
        said = self._fleet.loads(name)
        return [(one.load, one.age_seconds) for one in said if one is not None]

    def _candidate(self, worker: configuration.Worker, model: str) -> Worker:
        endpoint = self._endpoints.get(worker.endpoint)
        excluded = ""
        if self._config.model_of(worker) != model:
            excluded = f"serves {self._config.model_of(worker)}"
        elif endpoint is None:
            excluded = "its host name could not be resolved"
        return Worker(worker.endpoint, endpoint or worker.endpoint, excluded)

    def state(self, name: str) -> str:
        """The state of a worker's feeds."""
        return self._fleet.state(name).value

    def index_bytes(self) -> int:
        """Memory of the block index."""
        return self._fleet.index_bytes()

    def replays_done(self) -> bool:
        """Whether no feed waits for its publisher or catches up with it."""
        states = {self._fleet.state(worker.endpoint) for worker in self._config.workers}
        return states.isdisjoint((State.CONNECTING, State.REPLAYING))

    def status(self, in_flight: Callable[[str], int]) -> list[dict[str, Any]]:
        """The answer of GET /workers."""
        return [self._status(worker, in_flight) for worker in self._config.workers]

    def _status(
        self, worker: configuration.Worker, in_flight: Callable[[str], int]
    ) -> dict[str, Any]:
        name = worker.endpoint
        endpoint = self._endpoints.get(name, name)
        tiers = self._fleet.blocks_by_tier(name)
        learned = self._fleet.block_size(name)
        return {
            "endpoint": endpoint,
            "name": name,
            "model": self._config.model_of(worker),
            "state": self.state(name),
            "reason": self._feeds.reason(name),
            "block_size": learned or worker.block_size or self._config.policy.block_size,
            "feeds": [_feed(status) for status in self._fleet.feeds(name)],
            "blocks_by_tier": {
                tier.name.lower(): count for tier, count in zip(Tier, tiers, strict=True)
            },
            "in_flight": in_flight(endpoint),
            "tokens": self.checks.status(name),
        }

    async def _keep_resolved(self) -> None:
        named = [(name, place) for name, place in self._places.items() if not place.is_ip]
        while True:
            await asyncio.gather(*(self._resolve(name, place) for name, place in named))
            self._resolved_once.set()
            await asyncio.sleep(RESOLVE_INTERVAL_SECONDS)

    async def _resolve(self, name: str, place: Address) -> None:
        """Looks a host name up; the last address that was found stays where none is found now."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter of what can be no name at all
            if name not in self._endpoints:
                log.warning("worker %s: cannot be resolved yet: %s", name, error)
            return
        endpoints = sorted({str(Address(str(entry[4][0]), place.port)) for entry in found})
        if endpoints and self._endpoints.get(name) not in endpoints:
            self._endpoints[name] = endpoints[0]
            self._candidates.clear()
            log.info("worker %s is at %s", name, endpoints[0])


def _feed(status: FeedStatus) -> dict[str, Any]:
    return {
        "rank": status.rank,
        "state": status.state.value,
        "reason": status.reason,
        "last_sequence": status.last_sequence,
        "blocks": status.blocks,
        "uncertain_blocks": status.uncertain_blocks,
        "orphans": status.orphans,
        "gaps": status.gaps,
        "replays": status.replays,
        "restarts": status.restarts,
        "lag_seconds": round(status.lag_seconds, 6),
        "load": None if status.load is None else _load(status.load),
        "counts": dict(status.counts),
    }


def _load(reported: ReportedLoad) -> dict[str, Any]:
    return {**msgspec.to_builtins(reported.load), "age_seconds": round(reported.age_seconds, 3)}
