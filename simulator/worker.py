"""A running worker, as those who started it see it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.engine import Engine
from simulator.faults import Faults
from simulator.hashing import Namespace
from simulator.rank import Rank
from simulator.settings import Settings

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
