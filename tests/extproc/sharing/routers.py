"""Routers that share, connected only by their messages."""

from collections.abc import Sequence
from random import Random

import msgspec

from extproc.media.identities import Identities
from extproc.routing.claims.claim_table import Claim, ClaimTable, Holdings
from extproc.routing.claims.homes import Homes, Turn
from extproc.routing.claims.lines import Lines
from extproc.routing.claims.marks import Marks
from extproc.routing.load.endpoint_load import EndpointLoad
from extproc.routing.load.loads import Load, Loads
from extproc.sharing.home_reports import known_homes
from extproc.sharing.messages import (
    HomeReport,
    Keys,
    RouterReport,
    decoded,
    encoded,
    keys_of,
    sender_tag,
    worker_id,
)
from extproc.sharing.other_routers import MAX_CLAIMS, OtherRouters, Peer, SharedWorker
from extproc.sharing.reporter import Reporter

KEYS = keys_of(b"a secret")
WORKERS = ("10.0.0.1:8000", "10.0.0.2:8000")
FORGET_SECONDS = 0.2


def wall_us(now: float) -> int:
    return int((now + 1_000) * 1e6)


class Router:
    """One router's loads and claims, and the messages that it sends and receives."""

    def __init__(
        self,
        name: str,
        incarnation: int = 1,
        keys: Keys = KEYS,
        workers: Sequence[str] = WORKERS,
        *,
        max_claims: int = MAX_CLAIMS,
        **bounds: int,
    ) -> None:
        self.reporter = Reporter(keys, name, incarnation, **bounds)
        self.endpoints = {worker: EndpointLoad() for worker in workers}
        self.loads = Loads(self.endpoints, 1_000, self.reporter.touched)
        self.sent = ClaimTable(keys.marks)
        self.homes = Homes(keys.marks)
        self.lines = Lines(keys.marks, 10.0, 100)
        self.holdings = {worker: Holdings(f"name of {worker}") for worker in workers}
        self._places = {
            worker_id(keys, worker): SharedWorker(worker, self.holdings[worker])
            for worker in workers
        }
        chance = Random(name)
        self.identities = Identities()
        self.others = OtherRouters(
            self.reporter,
            self.loads,
            self.sent,
            self.homes,
            self.places,
            FORGET_SECONDS,
            lambda: chance.getrandbits(63),
            self.identities,
            max_claims,
            lines=self.lines,
        )
        self.reporter.lines = self.lines
        self.reporter.items.known = self.identities.items

    def places(self) -> dict[int, SharedWorker]:
        return self._places

    def due(self, now: float) -> list[bytes]:
        return self.reporter.compose(self.loads, now, wall_us(now), self.known_homes)

    def known_homes(self, now: float) -> list[HomeReport]:
        ids = {each.holdings.worker: number for number, each in self._places.items()}
        return known_homes(self.homes, ids, now)

    def hear(self, messages: Sequence[bytes], now: float) -> None:
        for message in messages:
            self.others.hear(message, now, wall_us(now))

    def knows(self, name: str) -> Peer:
        """The router with this name, whose requests count here."""
        (found,) = (other for other in self.others.peers.values() if other.origin == name)
        return found

    def forget_worker(self, worker: str) -> None:
        del self.endpoints[worker]
        del self._places[worker_id(KEYS, worker)]

    def in_flight_of(self, name: str) -> int:
        return self.loads.in_flight_of(self.knows(name).key)

    def load(self, worker: str, now: float) -> Load:
        return self.loads.load(worker, now)

    def send(self, worker: str, marks: Marks, now: float, tokens: float = 1_000.0) -> Claim:
        claim = self.sent.record(self.holdings[worker], marks, now)
        self.reporter.begin([claim], worker, tokens)
        return claim

    def turn(self, keys: Sequence[int], follows: int, worker: str, now: float) -> None:
        """Sends a conversation's request to a worker."""
        turn = Turn(tuple(keys), follows)
        self.homes.turn(turn, self.holdings[worker], now)
        self.reporter.note_turn(turn, worker)

    def home_of(self, key: int, now: float) -> str:
        """The worker that is the home of a key, "" if none is known."""
        return self.homes.find_worker((key,), now).removeprefix("name of ")

    def live(self, worker: str, now: float) -> float:
        """How many conversations count at a worker."""
        contexts = self.holdings[worker].contexts
        contexts.expire(now)
        return contexts.once + contexts.returned


def tell_all(routers: Sequence[Router], now: float) -> None:
    """Sends the messages that are due at each router to all others."""
    for router in routers:
        messages = router.due(now)
        for other in routers:
            if other is not router:
                other.hear(messages, now)


def met(*names: str, max_claims: int = MAX_CLAIMS) -> list[Router]:
    """Routers whose messages count for each other at 0.0."""
    routers = [Router(name, max_claims=max_claims) for name in names]
    for now in (-2.02, -2.01, -2.0, -1.0, -0.01):
        tell_all(routers, now)
    return routers


def introduce(router: Router, news: RouterReport, now: float) -> None:
    """Gives a router a message of a newcomer, with the answer to its challenge."""
    router.hear([encoded(news, KEYS)], now)
    said = [decoded(message, KEYS) for message in router.due(now)]
    tag = sender_tag(news.origin, news.incarnation)
    (number,) = (each.number for one in said for each in one.challenges if each.tag == tag)
    router.hear([encoded(msgspec.structs.replace(news, answers=(number,)), KEYS)], now)
