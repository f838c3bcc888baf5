"""Envoy's own load balancing policies, for comparison: what every Envoy has without a router.

They choose as Envoy 1.40 does (`source/extensions/load_balancing_policies`), from the same hashes,
so that a session is sent to the same endpoint as by a real Envoy with the same endpoints:

- least request: of two random endpoints the one with fewer requests, the first one if they are
  level;
- round robin;
- RING_HASH by a session header, with the default of at least 1,024 entries;
- MAGLEV by a session header, with the default table of 65,537 entries;
- RING_HASH with bounded loads (`hash_balance_factor`): an endpoint with more requests than its
  share of all, times the factor, is passed over for the first endpoint with room in an order that
  is drawn by the session; without any, the one least above its share is taken.

A request without the header has no hash, and goes to a random endpoint, as Envoy sends it.
"""

import bisect
import functools
import math
from collections.abc import Sequence
from random import Random
from typing import Protocol

import xxhash

LEAST_REQUEST, ROUND_ROBIN = "Envoy least_request", "Envoy round_robin"
RING_HASH, MAGLEV = "Envoy ring_hash", "Envoy maglev"
RING_HASH_125, RING_HASH_150 = "Envoy ring_hash 125", "Envoy ring_hash 150"

# The policies that look at no session, and those that keep one with an endpoint.
WITHOUT_SESSIONS = (LEAST_REQUEST, ROUND_ROBIN)
BY_SESSION = (RING_HASH, MAGLEV, RING_HASH_125, RING_HASH_150)

BALANCE_FACTORS = {RING_HASH_125: 125, RING_HASH_150: 150}

CHOICES = 2
RING_ENTRIES, TABLE_ENTRIES = 1_024, 65_537

_WORD = 0xFFFF_FFFF


def hash_of(session: str) -> int:
    """Returns the hash of a session's header, as `hash_policy` with one header makes it."""
    return int(xxhash.xxh64_intdigest(session.encode()))


class Table(Protocol):
    """Endpoints by hash."""

    def endpoint(self, hashed: int, attempt: int = 0) -> int:
        """Returns the number of an endpoint; attempt: how many others have refused."""


class Ring:
    """RING_HASH's ring; addresses: of the endpoints, in Envoy's order."""

    def __init__(self, addresses: Sequence[str], entries: int = RING_ENTRIES) -> None:
        found = sorted(
            (hash_of(f"{addresses[number]}_{place}"), number)
            for number, places in enumerate(_places(len(addresses), entries))
            for place in range(places)
        )
        self._hashes = [hashed for hashed, _ in found]
        self._numbers = [number for _, number in found]

    def endpoint(self, hashed: int, attempt: int = 0) -> int:
        """Returns the endpoint of the first entry from this hash on, or of a later one."""
        place = bisect.bisect_left(self._hashes, hashed) % len(self._hashes)
        return self._numbers[(place + attempt) % len(self._numbers)]


def _places(endpoints: int, entries: int) -> Sequence[int]:
    """Returns how many entries each endpoint has, with the rounding of Envoy's running sums."""
    weight = 1.0 / endpoints
    scale = math.ceil(weight * entries) / weight
    places, taken, target = [], 0, 0.0
    for _ in range(endpoints):
        target += scale * weight
        places.append(max(0, math.ceil(target) - taken))
        taken += places[-1]
    return places


class MaglevTable:
    """MAGLEV's table; addresses: of the endpoints."""

    def __init__(self, addresses: Sequence[str], entries: int = TABLE_ENTRIES) -> None:
        self._numbers = _maglev(tuple(addresses), entries)

    def endpoint(self, hashed: int, attempt: int = 0) -> int:
        """Returns the endpoint of this hash, or of another one for a later attempt."""
        if attempt:
            hashed ^= (1 << 64) - attempt
        return self._numbers[hashed % len(self._numbers)]


@functools.lru_cache(maxsize=64)
def _maglev(addresses: Sequence[str], entries: int) -> bytes | Sequence[int]:
    """Fills the table: each endpoint in turn takes the next free entry of its own permutation."""
    table = [-1] * entries
    turns = []
    for number in sorted(range(len(addresses)), key=addresses.__getitem__):
        encoded = addresses[number].encode()
        offset = xxhash.xxh64_intdigest(encoded) % entries
        skip = xxhash.xxh64_intdigest(encoded, 1) % (entries - 1) + 1
        turns.append([number, offset, skip])
    filled = 0
    while filled < entries:
        for turn in turns[: entries - filled]:
            number, place, skip = turn
            while table[place] >= 0:
                place = (place + skip) % entries
            table[place] = number
            turn[1] = (place + skip) % entries
            filled += 1
    return table


class BoundedLoads:
    """Passes over endpoints with more than their share of the requests under way.

    Envoy also counts requests under way at endpoints that have left or are not healthy; they are
    left out here.

    table: where the session belongs. factor: `hash_balance_factor`, in percent of the mean.
    """

    def __init__(self, table: Table, endpoints: int, factor: int) -> None:
        self._table = table
        self._endpoints = endpoints
        self._factor = factor
        self._orders: dict[int, Sequence[int]] = {}

    def slots(self, active: Sequence[int]) -> int:
        """Returns an endpoint's share of the requests; active: of each endpoint, before this."""
        total = ((sum(active) + 1) * self._factor + 99) // 100
        return max(1, math.ceil(total * (1 / self._endpoints)))

    def endpoint(self, hashed: int, active: Sequence[int], attempt: int = 0) -> int:
        """Returns the session's own endpoint, or the first other one with room."""
        own, slots = self._table.endpoint(hashed, attempt), self.slots(active)
        if active[own] <= slots:
            return own
        if hashed not in self._orders:
            self._orders[hashed] = _shuffled(hashed, self._endpoints)
        order = self._orders[hashed]
        with_room = (one for one in order if one != own and active[one] <= slots)
        return next(with_room, min((own, *order), key=active.__getitem__))


def _shuffled(hashed: int, count: int) -> Sequence[int]:
    """Returns the order in which Envoy tries the endpoints of an overloaded one's sessions."""
    twister, order = _twister(hashed & _WORD), list(range(count))
    for first in range(count):
        left = count - first
        drawn = left
        while drawn >= left:
            drawn = twister.getrandbits(32) // ((_WORD + 1) // left)
        order[first], order[first + drawn] = order[first + drawn], order[first]
    return order


def _twister(seed: int) -> Random:
    """Returns C++'s `std::mt19937` with this seed; Python would mix the seed in another way."""
    words = [seed]
    for number in range(1, 624):
        before = words[-1]
        words.append((1_812_433_253 * (before ^ before >> 30) + number) & _WORD)
    twister = Random()
    twister.setstate((3, (*words, 624), None))
    return twister


class Balancer(Protocol):
    """A policy over some endpoints, which are all healthy."""

    def choose(self, session: str, active: Sequence[int], attempt: int = 0) -> int:
        """Returns the number of an endpoint.

        session: "" if the request has no session header. active: how many requests this Envoy has
        under way at each endpoint. attempt: how many endpoints have refused this request.
        """


class _LeastRequest:
    def __init__(self, endpoints: int, chance: Random) -> None:
        self._endpoints = endpoints
        self._chance = chance

    def choose(self, _session: str, active: Sequence[int], _attempt: int = 0) -> int:
        drawn = (self._chance.randrange(self._endpoints) for _ in range(CHOICES))
        return min(drawn, key=active.__getitem__)


class _RoundRobin:
    def __init__(self, endpoints: int, chance: Random) -> None:
        self._endpoints = endpoints
        self._turn = chance.randrange(endpoints)

    def choose(self, _session: str, _active: Sequence[int], _attempt: int = 0) -> int:
        self._turn = (self._turn + 1) % self._endpoints
        return self._turn


class _BySession:
    def __init__(self, table: Table, factor: int, endpoints: int, chance: Random) -> None:
        self._table = table
        self._bounded = BoundedLoads(table, endpoints, factor) if factor else None
        self._chance = chance

    def choose(self, session: str, active: Sequence[int], attempt: int = 0) -> int:
        hashed = hash_of(session) if session else self._chance.getrandbits(64)
        if self._bounded is None:
            return self._table.endpoint(hashed, attempt)
        return self._bounded.endpoint(hashed, active, attempt)


def balancer_of(policy: str, addresses: Sequence[str], chance: Random) -> Balancer:
    """Returns one of the policies over endpoints with these addresses; chance: of its draws."""
    if policy == LEAST_REQUEST:
        return _LeastRequest(len(addresses), chance)
    if policy == ROUND_ROBIN:
        return _RoundRobin(len(addresses), chance)
    table: Table = MaglevTable(addresses) if policy == MAGLEV else Ring(addresses)
    return _BySession(table, BALANCE_FACTORS.get(policy, 0), len(addresses), chance)
