"""A running worker, as those who started it see it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.engine import Engine
from simulator.hashing import Namespace
from simulator.interference import Corruption, ReplayFault
from simulator.rank import Rank
from simulator.settings import Settings


class Faults:
    """Each method concerns one rank, or all if none is named (IndexError if there is none such).

    What was asked for stays asked for over a restart.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    def drop(self, batches: int, *, rank: int | None = None) -> None:
        """The next batches are numbered and kept for replay, but not sent."""
        for one in self._of(rank):
            one.interference.drop = batches

    def lose(self, batches: int, *, rank: int | None = None) -> None:
        """The next batches are numbered, neither sent nor kept."""
        for one in self._of(rank):
            one.interference.lose = batches

    def duplicate(self, batches: int, *, rank: int | None = None) -> None:
        """The next batches are sent twice."""
        for one in self._of(rank):
            one.interference.duplicate = batches

    def reorder(self, *, rank: int | None = None) -> None:
        """The next two batches are sent in the opposite order: the first waits for the second."""
        for one in self._of(rank):
            one.interference.reorder = True

    def corrupt(self, what: Corruption, *, rank: int | None = None) -> None:
        """The next batch has one undecodable event in the place of its first, or is no msgpack.

        What it tells of did happen. A replay gives the same bytes, as an engine would.
        """
        for one in self._of(rank):
            one.interference.corrupt = what

    def garbage(self, messages: int, *, rank: int | None = None) -> None:
        """Sends random bytes at once, numbered and kept as batches are."""
        for one in self._of(rank):
            if one.publisher is not None:
                one.publisher.publish_garbage(messages)

    def hide_replay(self, fault: ReplayFault | None, *, rank: int | None = None) -> None:
        """silent: requests are swallowed; absent: the socket is closed; truncated: answers stop
        half-way, without the end marker; None: healthy again."""
        for one in self._of(rank):
            if one.publisher is not None:
                one.publisher.show_replay_fault(fault)

    def hide_events(self, *, hidden: bool, rank: int | None = None) -> None:
        """The socket of events is closed, or opened again; the worker serves on, and what it would
        have published is numbered and kept for replays."""
        for one in self._of(rank):
            if one.publisher is not None:
                one.publisher.show_events(hidden=hidden)

    def restart(self, *, rank: int | None = None) -> None:
        """A new incarnation: an empty cache, numbers from 0, an empty replay buffer, and the
        sockets closed and bound again on the same ports. Nothing is announced, but for the clear
        that SGLang begins with."""
        for one in self._of(rank):
            one.restart()

    def _of(self, rank: int | None) -> Sequence[Rank]:
        return self._ranks if rank is None else [self._ranks[rank]]


# How often the API server of vLLM 0.32 hears of its ranks' queues (DPCoordinator).
BALANCE_SECONDS = 0.1


class Balance:
    """How vLLM's API server shares requests among its ranks (DPLBAsyncMPClient, 0.32).

    The rank with the lowest score, four times those that wait and once those that run, of counts
    that are told it every 100 ms; what it sent since counts as waiting.
    """

    def __init__(self) -> None:
        self._scores: list[int] = []
        self._told_at = 0.0

    def pick(self, in_flight: Sequence[int], now: float) -> int:
        """The number of the rank for the next request."""
        if not self._scores or now - self._told_at >= BALANCE_SECONDS:
            self._scores, self._told_at = list(in_flight), now
        rank = min(range(len(self._scores)), key=self._scores.__getitem__)
        self._scores[rank] += 4
        return rank


@dataclass(frozen=True, slots=True)
class Worker:
    """A running worker. What is said of its events without a rank is said of rank 0."""

    name: str
    endpoint: str
    """host:port of its API."""
    settings: Settings
    ranks: Sequence[Rank]
    faults: Faults
    balance: Balance = field(default_factory=Balance)

    @property
    def url(self) -> str:
        """Of its API, without a slash at the end."""
        return f"http://{self.endpoint}"

    @property
    def events_endpoint(self) -> str | None:
        """Where events are published."""
        return next(iter(self.events_endpoints), None)

    @property
    def replay_endpoint(self) -> str | None:
        """Where they can be asked for again."""
        return next(iter(self.replay_endpoints), None)

    @property
    def events_endpoints(self) -> list[str]:
        """By rank; empty if nothing is published."""
        return [rank.publisher.endpoint for rank in self.ranks if rank.publisher]

    @property
    def replay_endpoints(self) -> list[str]:
        """By rank; empty if nothing can be asked for again."""
        publishers = [rank.publisher for rank in self.ranks if rank.publisher]
        return [one.replay_endpoint for one in publishers if one.replay_endpoint]

    @property
    def engine(self) -> Engine:
        """Of rank 0."""
        return self.ranks[0].engine

    def next_sequence(self, rank: int = 0) -> int:
        """The number that the rank's next batch will have; 0 if it publishes nothing."""
        publisher = self.ranks[rank].publisher
        return publisher.next_sequence if publisher else 0

    def held_prefix_tokens(
        self,
        prompt_tokens: Sequence[int],
        salt: str | None = None,
        lora: str | None = None,
        rank: int = 0,
    ) -> int:
        """How many leading tokens of a prompt the rank's cache holds, short of the last one.

        KeyError if there is no such adapter, IndexError if there is no such rank.
        """
        adapter = None if lora is None else self.settings.adapters[lora]
        namespace = Namespace(adapter, salt)
        return self.ranks[rank].engine.cache.held_tokens(prompt_tokens, namespace)

    def pick_rank(self, pinned: str | None) -> Rank:
        """The rank for a request: the one it names (ValueError if there is none), or as vLLM's
        balancer takes one, which knows nothing of what they hold."""
        if pinned is None:
            in_flight = [rank.engine.counters.in_flight for rank in self.ranks]
            return self.ranks[self.balance.pick(in_flight, time.monotonic())]
        if not (pinned.isascii() and pinned.isdigit() and int(pinned) < len(self.ranks)):
            raise ValueError(f"data_parallel_rank {pinned} is not from 0 to {len(self.ranks) - 1}")
        return self.ranks[int(pinned)]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; the ranks where requests run refuse."""
        done = [rank.engine.reset_prefix_cache() for rank in self.ranks]
        return all(done)
