"""A running worker for tests and commands: its endpoints and its faults."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtools.simulator.block_transfer import BlockTransfer
from kvtools.simulator.engine import SimulatedEngine
from kvtools.simulator.hashing import CacheNamespace
from kvtools.simulator.interference import Corruption, ReplayFault
from kvtools.simulator.rank import Rank
from kvtools.simulator.settings import Settings


class Faults:
    """The faults of a worker's publishers; they survive a restart.

    Each method acts on one rank, or on all if none is named.

    Raises:
        IndexError: there is no such rank.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    def drop(self, batches: int, *, rank: int | None = None) -> None:
        """Numbers the next batches and keeps them for replay, but does not send them."""
        for one in self._ranks_of(rank):
            one.interference.drop = batches

    def lose(self, batches: int, *, rank: int | None = None) -> None:
        """Numbers the next batches, and neither sends nor keeps them."""
        for one in self._ranks_of(rank):
            one.interference.lose = batches

    def duplicate(self, batches: int, *, rank: int | None = None) -> None:
        """Sends the next batches twice."""
        for one in self._ranks_of(rank):
            one.interference.duplicate = batches

    def reorder(self, *, rank: int | None = None) -> None:
        """Sends the next two batches in the opposite order: the first waits for the second."""
        for one in self._ranks_of(rank):
            one.interference.reorder = True

    def corrupt(self, what: Corruption, *, rank: int | None = None) -> None:
        """Makes the first event of the next batch undecodable, or the whole batch no msgpack.

        The events of the batch did happen. A replay returns the same bytes, as an engine would.
        """
        for one in self._ranks_of(rank):
            one.interference.corrupt = what

    def shift_clock(self, seconds: float, *, rank: int | None = None) -> None:
        """Stamps batches this many seconds ahead of time; below 0, behind it."""
        for one in self._ranks_of(rank):
            one.interference.clock_ahead_seconds = seconds

    def garbage(self, messages: int, *, rank: int | None = None) -> None:
        """Sends random bytes at once, numbered and kept as batches are."""
        for one in self._ranks_of(rank):
            if one.publisher is not None:
                one.publisher.publish_garbage(messages)

    def hide_replay(self, fault: ReplayFault | None, *, rank: int | None = None) -> None:
        """Breaks the replay socket: silent, absent or truncated; None: healthy again.

        silent: requests are swallowed. absent: the socket is closed. truncated: answers stop
        half-way, without the end marker.
        """
        for one in self._ranks_of(rank):
            if one.publisher is not None:
                one.publisher.show_replay_fault(fault)

    def hide_events(self, *, hidden: bool, rank: int | None = None) -> None:
        """Closes the socket of events, or opens it again; the worker keeps serving.

        Batches that it would have published are numbered and kept for replays.
        """
        for one in self._ranks_of(rank):
            if one.publisher is not None:
                one.publisher.show_events(hidden=hidden)

    def restart(self, *, rank: int | None = None) -> None:
        """Begins a new incarnation: an empty cache, numbers from 0, an empty replay buffer.

        The sockets are closed and bound again on the same ports. No event is published, except for
        the clear with which SGLang begins.
        """
        for one in self._ranks_of(rank):
            one.restart()

    def _ranks_of(self, rank: int | None) -> Sequence[Rank]:
        return self._ranks if rank is None else [self._ranks[rank]]


# How often the API server of vLLM 0.32 gets its ranks' queue lengths (DPCoordinator).
BALANCE_SECONDS = 0.1


class Balance:
    """Shares requests among ranks as vLLM's API server does (DPLBAsyncMPClient, 0.32).

    It picks the rank with the lowest score: its requests in flight, as counted every 100 ms, plus
    four for each request sent there since then, which counts as waiting.
    """

    def __init__(self) -> None:
        self._scores: list[int] = []
        self._reported_at = 0.0

    def pick(self, in_flight: Sequence[int], now: float) -> int:
        """Returns the number of the rank for the next request.

        in_flight: the requests of every rank. now: seconds of a monotonic clock.
        """
        if not self._scores or now - self._reported_at >= BALANCE_SECONDS:
            self._scores, self._reported_at = list(in_flight), now
        rank = min(range(len(self._scores)), key=self._scores.__getitem__)
        self._scores[rank] += 4
        return rank


@dataclass(frozen=True, slots=True)
class SimulatedWorker:
    """A running worker. Events are those of rank 0 if no rank is named."""

    name: str
    endpoint: str
    """host:port of its API."""
    settings: Settings
    ranks: Sequence[Rank]
    faults: Faults
    transfer: BlockTransfer
    balance: Balance = field(default_factory=Balance)

    @property
    def url(self) -> str:
        """The URL of its API, without a slash at the end."""
        return f"http://{self.endpoint}"

    @property
    def events_endpoint(self) -> str | None:
        """The endpoint of events, or None."""
        return next(iter(self.events_endpoints), None)

    @property
    def replay_endpoint(self) -> str | None:
        """The endpoint of replays, or None."""
        return next(iter(self.replay_endpoints), None)

    @property
    def events_endpoints(self) -> list[str]:
        """The events endpoint of each rank; empty if nothing is published."""
        return [rank.publisher.endpoint for rank in self.ranks if rank.publisher]

    @property
    def replay_endpoints(self) -> list[str]:
        """The replay endpoint of each rank; empty if there are none."""
        publishers = [rank.publisher for rank in self.ranks if rank.publisher]
        return [one.replay_endpoint for one in publishers if one.replay_endpoint]

    @property
    def load_endpoints(self) -> list[str]:
        """The load endpoint of each rank; empty if there are none."""
        return [rank.load.endpoint for rank in self.ranks if rank.load]

    @property
    def engine(self) -> SimulatedEngine:
        """The engine of rank 0."""
        return self.ranks[0].engine

    def next_sequence(self, rank: int = 0) -> int:
        """Returns the number of the rank's next batch; 0 if it publishes nothing."""
        publisher = self.ranks[rank].publisher
        return publisher.next_sequence if publisher else 0

    def held_prefix_tokens(
        self,
        prompt_tokens: Sequence[int],
        salt: str | None = None,
        lora: str | None = None,
        rank: int = 0,
    ) -> int:
        """Returns how many leading tokens of a prompt a rank has cached, never all of them.

        Raises:
            KeyError: there is no such adapter.
            IndexError: there is no such rank.
        """
        adapter = None if lora is None else self.settings.adapters[lora]
        namespace = CacheNamespace(adapter, salt)
        return self.ranks[rank].engine.cache.held_tokens(prompt_tokens, namespace)

    def pick_rank(self, pinned: str | None) -> Rank:
        """Returns the rank that a request names, or the one that vLLM's balancer picks.

        The balancer does not know the ranks' caches.

        Raises:
            ValueError: there is no such rank.
        """
        if pinned is None:
            in_flight = [rank.engine.counters.in_flight for rank in self.ranks]
            return self.ranks[self.balance.pick(in_flight, time.monotonic())]
        if not (pinned.isascii() and pinned.isdigit() and int(pinned) < len(self.ranks)):
            raise ValueError(f"data_parallel_rank {pinned} is not from 0 to {len(self.ranks) - 1}")
        return self.ranks[int(pinned)]

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks; returns False if a rank refused because requests run there."""
        done = [rank.engine.reset_prefix_cache() for rank in self.ranks]
        return all(done)
