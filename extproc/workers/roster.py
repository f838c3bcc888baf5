"""Who the workers are: what the configuration, their source, and they themselves say."""

import random
from collections.abc import Callable

from extproc.config import Config, Worker
from extproc.discovery.view import STATIC, Found, listed, merged
from extproc.discovery.view import Fleet as Members
from extproc.picking import eligibility
from extproc.workers.feeds import Wanted, wanted
from extproc.workers.learning import Learning
from extproc.workers.resolving import Resolving


class Roster:
    """All workers by name, each with its address, and what is known of each.

    moved: is told the name of a worker whose address changed, and the ip:port that it had, None if
    it had none. learned: is called after a worker told something new of itself.
    """

    def __init__(
        self,
        config: Config,
        moved: Callable[[str, str | None], None],
        learned: Callable[[], None],
    ) -> None:
        self._config = config
        self._members: Members = merged({STATIC: listed(config.workers)})
        self._drained: set[str] = set()
        self._moved = moved
        self._resolving = Resolving(self._members, self._note_moved)
        self._learning = Learning(config.models, lambda _: learned(), random.random)

    async def start(self) -> None:
        """Resolves names once, then keeps them resolved; asks workers what they serve."""
        await self._resolving.start()
        await self.ask()

    async def ask(self) -> None:
        """Asks the workers that are there now, and no others any more."""
        await self._learning.ask(
            {name: member.found.worker for name, member in self._members.items()}
        )

    async def close(self) -> None:
        """Looks nothing up any more, and asks nobody."""
        await self._resolving.close()
        await self._learning.close()

    @property
    def members(self) -> Members:
        """The workers as they were configured or found."""
        return self._members

    def replace(self, members: Members) -> list[tuple[str, str]]:
        """From now on these are the workers; name and endpoint of those that are gone.

        Gone is a worker too whose address another engine has now.
        """
        gone = [(name, self.endpoint(name)) for name in self._members if self._left(name, members)]
        for name, before in self._members.items():
            if name in members and members[name].found != before.found:
                self._learning.ask_now(name)
        self._members = members
        self._resolving.replace(members)
        for name, _ in gone:
            self._drained.discard(name)
            self._learning.forget(name)
        return gone

    def _note_moved(self, name: str, before: str | None) -> None:
        self._learning.ask_now(name)
        self._moved(name, before)

    def _left(self, name: str, members: Members) -> bool:
        now = members.get(name)
        return now is None or now.found.identity != self._members[name].found.identity

    def endpoint(self, name: str) -> str:
        """ip:port of a worker now; its name while it could not be resolved."""
        return self._resolving.endpoint(name) or name

    def places(self) -> list[tuple[str, str]]:
        """Name and ip:port of every worker that has one now."""
        return self._resolving.items()

    def found(self, name: str) -> Found:
        """A worker as it was configured or found."""
        return self._members[name].found

    def model_of(self, name: str) -> str | None:
        """The model that a worker serves; None while that is not known."""
        model = self.found(name).worker.model or self._learning.of(name).model
        only = self._config.models[0].name if len(self._config.models) == 1 else None
        return model or only

    def adapters(self, name: str, *, is_listed: bool) -> frozenset[str] | None:
        """The adapters that a worker serves; None for all of its model's.

        is_listed: whether any worker of the model lists adapters. Where none does, a list without
        adapters says nothing: some engines list models only.
        """
        given = self.found(name).worker.lora
        if given is not None:
            return frozenset(given)
        told = self._learning.of(name).adapters
        return told if told or is_listed else None

    def block_size(self, name: str) -> int:
        """Tokens in a worker's block, as long as its events do not tell."""
        given, told = self.found(name).worker.block_size, self._learning.of(name).block_size
        return given or told or self._config.policy.block_size

    def drain(self, name: str, *, draining: bool) -> list[str]:
        """Gives a worker no new requests, or gives it some again; the names that are meant.

        name: its configured name, or its ip:port.
        """
        names = [one for one in self._members if name in (one, self.endpoint(one))]
        for one in names:
            (self._drained.add if draining else self._drained.discard)(one)
        return names

    def is_draining(self, name: str) -> bool:
        """Whether a worker gets no new requests: by the operator, or as it was found."""
        return name in self._drained or self.found(name).worker.draining

    def candidates(self, model: str) -> list[eligibility.Worker]:
        """Every worker as a candidate for requests to a model."""
        listing = {name for name in self._members if self._learning.of(name).adapters}
        is_listed = any(self.model_of(name) == model for name in listing)
        return [self._candidate(name, model, is_listed=is_listed) for name in self._members]

    def _candidate(self, name: str, model: str, *, is_listed: bool) -> eligibility.Worker:
        endpoint = self._resolving.endpoint(name)
        excluded = self.found(name).excluded
        serves = self.model_of(name)
        if serves != model:
            excluded = f"serves {serves}" if serves else "its model is not known yet"
        elif endpoint is None:
            excluded = "its host name could not be resolved"
        adapters = self.adapters(name, is_listed=is_listed)
        return eligibility.Worker(name, endpoint or name, excluded, adapters)

    def lanes(self) -> dict[str, list[tuple[str, bool]]]:
        """By model, ip:port of each worker, and whether it takes new requests."""
        lanes: dict[str, list[tuple[str, bool]]] = {}
        for name, endpoint in self.places():
            is_open = not (self.is_draining(name) or self.found(name).excluded)
            lanes.setdefault(self.model_of(name) or "", []).append((endpoint, is_open))
        return lanes

    def unplaced(self) -> set[str] | None:
        """ip:port of the workers whose model is not known yet; None while one has no address."""
        places = self.places()
        if len(places) < len(self._members):
            return None
        return {endpoint for name, endpoint in places if self.model_of(name) is None}

    def wanted_feeds(self) -> dict[str, Wanted]:
        """The feeds to be followed; of a worker whose model is not known, none yet."""
        known: list[tuple[str, Worker, str]] = []
        for name in self._members:
            model = self.model_of(name)
            if model:
                known.append((name, self.found(name).worker, model))
        return {name: self._with_identity(name, one) for name, one in wanted(known).items()}

    def _with_identity(self, name: str, one: Wanted) -> Wanted:
        found = self.found(name)
        return one._replace(identity=found.identity, adapters=found.adapters)
