"""The ranks of all workers that are followed now."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstate.feeds.subscriber import Subscriber
from kvstate.index.owner import Owner
from kvstate.relay.relayed import RelayedRank
from kvstate.relay.taps import Tap


@dataclass(frozen=True, slots=True)
class FollowedRank:
    """One rank of a worker."""

    # Holds its blocks.
    owner: Owner
    # Runs its feed, or stands for the one that another process of this host runs.
    subscriber: Subscriber | RelayedRank
    # Runs the subscriber; None if another process does.
    task: asyncio.Task[None] | None = None
    # Passes its events on to the other processes of this host; None if none may read them.
    tap: Tap | None = None


class RankTable:
    """The ranks of each worker, by its name, in their order.

    by_worker: the same to read, for what is called at every pick.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, Sequence[FollowedRank]] = {}
        self.by_worker: Mapping[str, Sequence[FollowedRank]] = self._ranks

    def __contains__(self, worker: str) -> bool:
        return worker in self._ranks

    def workers(self) -> list[str]:
        """Returns the names of the workers that are followed now."""
        return list(self._ranks)

    def of(self, worker: str) -> Sequence[FollowedRank]:
        """Returns the ranks of a worker, none if it is not followed."""
        return self._ranks.get(worker, ())

    def put(self, worker: str, ranks: Sequence[FollowedRank]) -> None:
        """Notes the ranks of a worker, which replace those that it had."""
        self._ranks[worker] = ranks

    def pop(self, worker: str) -> Sequence[FollowedRank]:
        """Forgets a worker and returns its ranks."""
        return self._ranks.pop(worker, ())

    def has(self, worker: str, ranks: Sequence[FollowedRank]) -> bool:
        """Whether `of` would return the same object.

        It does not if the worker was removed meanwhile, even if it was added again.
        """
        return self._ranks.get(worker) is ranks
