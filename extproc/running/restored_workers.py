"""Workers that begin with what a router knew of them: this one before a restart, or another one.

What they begin with is uncertain until each worker's publisher has proven that it is the same
(`kvstate.feeds.feed`). A starting router waits a little for that before it serves.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from kvstate.feeds.feed import Restoration
from kvstate.fleet import FollowedWorkers
from kvstate.rows.format import SavedRows, SavedStoreRows
from kvstate.rows.reader import SavedState
from kvstate.rows.sections import Section

log = logging.getLogger("kvsteer.state")

# How long a starting router waits until publishers have proven what was restored, and how long if
# another router serves meanwhile; a worker that does not answer by then is uncertain until it does.
PROVING_SECONDS = 1.0
RELIEVING_SECONDS = 20.0

# How often it looks whether they have, and for how long it looks for those that are late.
LOOK_SECONDS = 0.005
# What a look counts for at most: while the process gets no CPU, no answer can be read.
LONGEST_LOOK_SECONDS = 4 * LOOK_SECONDS
LOOK_LATE_SECONDS = 0.5
LATE_SECONDS = 600.0


class Keeper(Protocol):
    """Knows more that outlives a restart, in a section of its own.

    section, version: of what it saves.
    """

    section: str
    version: int

    def saved(self) -> Iterator[bytes]:
        """Yields what it saves now, in pieces that take less than a millisecond each."""

    def restore(self, contents: bytes) -> None:
        """Takes one of these pieces, before any worker is followed.

        Raises:
            ValueError: it is no such thing.
        """

    def note_proven(self, worker: str) -> None:
        """Notes that a worker is the one of which something was saved."""


class RestoredWorkers:
    """Hands out what is known of workers when they are followed, and notes which are proven.

    identity: returns that of a worker's engine, None for an unknown worker. keepers: restore more.
    proving_seconds: how long it waits for publishers at most, while the process can run. outcomes:
    how many workers were proven, or lost.
    """

    def __init__(
        self,
        fleet: FollowedWorkers,
        identity: Callable[[str], str | None],
        keepers: Sequence[Keeper] = (),
        proving_seconds: float = PROVING_SECONDS,
    ) -> None:
        self._fleet = fleet
        self._identity = identity
        self._keepers = keepers
        self._proving_seconds = proving_seconds
        self._unclaimed: dict[str, dict[int, SavedRows]] = {}
        self._unproven: set[str] = set()
        self._stores: list[SavedStoreRows] = []
        self._task: asyncio.Task[None] | None = None
        self.outcomes: Counter[Restoration] = Counter()
        fleet.subscriptions.take_saved = self.take

    def identity_of(self, worker: str) -> str:
        """Returns the identity of a worker's engine, "" for an unknown worker."""
        return self._identity(worker) or ""

    def add(self, state: SavedState) -> None:
        """Takes what is known of workers; it replaces what was known before.

        To be called before they are followed.
        """
        self._unclaimed |= state.ranks
        self._stores += state.stores.values()
        for keeper in self._keepers:
            for section in state.others.get(keeper.section, ()):
                _hand(keeper, section)

    def take(self, worker: str, model: str, ranks: int) -> Mapping[int, SavedRows]:
        """Returns what is known of a worker's ranks, once, if it is still the same worker."""
        saved = self._unclaimed.pop(worker, {})
        identity = self._identity(worker)
        taken = {
            number: one
            for number, one in saved.items()
            if (one.rank.model, one.rank.ranks, one.rank.identity) == (model, ranks, identity)
        }
        if len(taken) < len(saved):
            log.info("state: worker %s has other ranks or another model now", worker)
        if taken:
            self._unproven.add(worker)
        return taken

    async def begin(self) -> None:
        """Has stores begin with what is known of them, before any worker is followed."""
        stores, self._stores = self._stores, []
        await self._fleet.rows.restore_stores(stores)

    async def start(self, is_complete: Callable[[], bool] = lambda: True) -> None:
        """Waits a little until what was restored is certain, then goes on looking for the rest.

        is_complete: returns whether all workers are known that will be soon.
        """
        if self._unproven:
            log.info("state: waiting for the publishers of %d workers", len(self._unproven))
        time_of, waited_seconds = asyncio.get_running_loop().time, 0.0
        while self._unproven or (self._unclaimed and not is_complete()):
            self._look()
            if waited_seconds >= self._proving_seconds:
                break
            began_at = time_of()
            await asyncio.sleep(LOOK_SECONDS)
            waited_seconds += min(time_of() - began_at, LONGEST_LOOK_SECONDS)
        if self.outcomes or self._unproven:
            log.info(
                "state: %d workers are known again, %d are not, %d have not answered yet",
                self.outcomes[Restoration.PROVEN],
                self.outcomes.total() - self.outcomes[Restoration.PROVEN],
                len(self._unproven),
            )
        self._task = asyncio.create_task(self._look_for_late())

    async def close(self) -> None:
        """Stops looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _look(self) -> None:
        """Notes which workers are proven and caught up by now, and tells the keepers."""
        for worker in list(self._unproven):
            found = self._fleet.feeds.restoration(worker)
            if found is Restoration.UNPROVEN or not self._fleet.feeds.is_certain(worker):
                continue
            self._unproven.discard(worker)
            self.outcomes[found] += 1
            if found is not Restoration.PROVEN:
                self._fleet.stores.note_lost(worker)
                continue
            self._fleet.stores.note_proven(worker)
            for keeper in self._keepers:
                keeper.note_proven(worker)

    async def _look_for_late(self) -> None:
        until = asyncio.get_running_loop().time() + LATE_SECONDS
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(LOOK_LATE_SECONDS)
            self._look()
            await self._fleet.rows.forget_lost_stores()
        self._fleet.stores.note_lost()
        await self._fleet.rows.forget_lost_stores()
        if self._unclaimed:
            log.info("state: %d of its workers are not in the fleet", len(self._unclaimed))
            self._unclaimed.clear()


def _hand(keeper: Keeper, section: Section) -> None:
    if section.version != keeper.version:
        return
    try:
        keeper.restore(bytes(section.contents))
    except ValueError as error:
        log.warning("state: section %s is not used: %s", section.name, error)
