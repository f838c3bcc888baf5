"""Routers that share in simulated time: the router's own messages, and its own picture of others.

Nothing is lost on the way, and a message takes a millisecond.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from extproc.picking.load import EndpointLoad, Loads
from extproc.picking.sent import Holdings, Sent
from extproc.sharing.messages import keys_of, worker_id
from extproc.sharing.picture import Picture, Place
from extproc.sharing.telling import Telling

# From a router to all others.
DELAY_SECONDS = 0.001

KEYS = keys_of(b"simulated")


def _forget_seconds(tick_seconds: float) -> float:
    return 10 * tick_seconds + 0.1


class Sharer:
    """One router's part in it: what it tells, and what it makes of what it is told."""

    def __init__(
        self,
        number: int,
        endpoints: Mapping[str, EndpointLoad],
        prefill_rate: float,
        sent: Sent,
        holdings: Mapping[str, Holdings],
        tick_seconds: float,
        *,
        learns: bool = False,
    ) -> None:
        self.telling = Telling(KEYS, f"router-{number}", 1)
        self.loads = Loads(endpoints, prefill_rate, self.telling.touched, learns=learns)
        places = {worker_id(KEYS, name): Place(name, one) for name, one in holdings.items()}
        self.picture = Picture(
            KEYS, self.loads, sent, lambda: places, _forget_seconds(tick_seconds)
        )

    def tick(self, now: float) -> Sequence[bytes]:
        """Returns what it tells now."""
        self.picture.forget(now)
        return self.telling.due(self.loads, now, _wall_us(now))

    def hear(self, wire: bytes, now: float) -> None:
        """Takes what another one told."""
        news = self.picture.hear(wire, now, _wall_us(now))
        if news is not None and news.is_hello:
            self.telling.asked()


def _wall_us(now: float) -> int:
    return 1_000_000 + int(now * 1e6)


@dataclass(order=True, slots=True)
class _Due:
    """What is due at a time: a router's tick, or messages of it that arrive; in order of number."""

    at: float
    number: int
    sender: int = field(compare=False)
    messages: Sequence[bytes] | None = field(compare=False, default=None)


class Exchange:
    """The messages between routers; each begins its ticks at a time of its own."""

    def __init__(self, sharers: Sequence[Sharer], tick_seconds: float, chance: Random) -> None:
        self._sharers = sharers
        self._tick_seconds = tick_seconds
        self._count = 0
        self._due: list[_Due] = []
        self._told_at = [-1.0] * len(sharers)
        for sender in range(len(sharers)):
            self._plan(tick_seconds * chance.random(), sender, None)

    def begun(self, sender: int, now: float) -> None:
        """A router sent a request: if its last message is a tick ago, it tells at once."""
        if now - self._told_at[sender] >= self._tick_seconds:
            self._tell(sender, now)

    def _tell(self, sender: int, now: float) -> None:
        messages = self._sharers[sender].tick(now)
        if messages:
            self._told_at[sender] = now
            self._plan(now + DELAY_SECONDS, sender, messages)

    def until(self, now: float) -> None:
        """Does all that is due until now."""
        while self._due and self._due[0].at <= now:
            due = heapq.heappop(self._due)
            if due.messages is None:
                told_at = self._told_at[due.sender]
                if due.at - told_at >= self._tick_seconds - 1e-9:
                    self._tell(due.sender, due.at)
                    told_at = due.at
                self._plan(told_at + self._tick_seconds, due.sender, None)
                continue
            for receiver, sharer in enumerate(self._sharers):
                if receiver != due.sender:
                    for message in due.messages:
                        sharer.hear(message, due.at)

    def _plan(self, at: float, sender: int, messages: Sequence[bytes] | None) -> None:
        self._count += 1
        heapq.heappush(self._due, _Due(at, self._count, sender, messages))
