"""Routers that share, connected only by their messages."""

from collections.abc import Mapping, Sequence

from extproc.picking.load import EndpointLoad, Load, Loads
from extproc.picking.sent import Claim, Holdings, Marks, Sent
from extproc.sharing.messages import Keys, keys_of, worker_id
from extproc.sharing.picture import Picture, Place
from extproc.sharing.telling import Telling

KEYS = keys_of(b"a secret")
WORKERS = ("10.0.0.1:8000", "10.0.0.2:8000")
FORGET_SECONDS = 0.2


class Router:
    """One router's loads and claims, and the messages that it sends and receives."""

    def __init__(
        self,
        name: str,
        incarnation: int = 1,
        keys: Keys = KEYS,
        workers: Sequence[str] = WORKERS,
    ) -> None:
        self.telling = Telling(keys, name, incarnation)
        self.endpoints = {worker: EndpointLoad() for worker in workers}
        self.loads = Loads(self.endpoints, 1_000, self.telling.touched)
        self.sent = Sent(keys.marks)
        self.holdings = {worker: Holdings(f"name of {worker}") for worker in workers}
        self._places = {
            worker_id(keys, worker): Place(worker, self.holdings[worker]) for worker in workers
        }
        self.picture = Picture(keys, self.loads, self.sent, self.places, FORGET_SECONDS)

    def places(self) -> Mapping[int, Place]:
        return self._places

    def due(self, now: float) -> list[bytes]:
        return self.telling.due(self.loads, now, 0)

    def hear(self, messages: Sequence[bytes], now: float) -> None:
        for message in messages:
            news = self.picture.hear(message, now, 0)
            if news is not None and news.is_hello:
                self.telling.asked()

    def load(self, worker: str, now: float) -> Load:
        return self.loads.load(worker, now)

    def send(self, worker: str, marks: Marks, now: float, tokens: float = 1_000.0) -> Claim:
        claim = self.sent.record(self.holdings[worker], marks, now)
        self.telling.begun([claim], worker, tokens)
        return claim


def tell_all(routers: Sequence[Router], now: float) -> None:
    """Sends the messages that are due at each router to all others."""
    for router in routers:
        messages = router.due(now)
        for other in routers:
            if other is not router:
                other.hear(messages, now)
