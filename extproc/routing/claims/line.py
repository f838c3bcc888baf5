"""The line of those who wait for room: who is next, and who keeps a place without waiting.

Who came first goes first, among requests of one class; tenants of one class take turns. A place
belongs to a conversation, not to a connection: whoever leaves and comes again keeps it for a while,
and those behind do not wait for him meanwhile.

Several routers that share have one line: each knows the first places of the others, leaves room for
those before its own, and takes over a place if a conversation comes again through it.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

import msgspec

# A place that has been empty for so long is given up if it is the last one: clients that were
# refused come again within 40 s or so (docs/more-agents-than-cache.md).
RETURN_SECONDS = 45.0

# What places are ordered by: the class, the tenant's turn, when the conversation came.
Order = tuple[int, int, float]


class Place(msgspec.Struct, eq=False):
    """One conversation's place; times are those of the caller's clock, in seconds.

    key: of its request. follows: of the one before it in its conversation, 0 for none. tokens: the
    room that it needs. tenant: its key. order: lower ones go first. since: when the request came.
    until: when its wait ends, or its empty place is given up. is_away: whether nobody waits there
    now. router: of another router that has the place, "" for this one.
    """

    key: int
    follows: int
    tokens: float
    tenant: int
    order: Order
    since: float
    until: float
    is_away: bool = False
    router: str = ""


# The place of one for whom there is none.
NO_PLACE = Place(0, 0, 0.0, 0, (0, 0, 0.0), 0.0, 0.0, is_away=True)


class KnownPlace(NamedTuple):
    """A place as other routers know it.

    level, turn: of its order. waited_seconds: since the conversation came.
    """

    key: int
    follows: int
    tokens: float
    tenant: int
    level: int
    turn: int
    waited_seconds: float
    is_away: bool


class Line:
    """Those who wait for room.

    bound_seconds: how long one waits at most, and how long an empty place is kept. most: how many
    places of this router there are at most. most_of_tenant: of one tenant, the same unless told.
    places: how many of them there are, empty ones included. changes: of these, so far.
    """

    def __init__(self, bound_seconds: float, most: int, most_of_tenant: int | None = None) -> None:
        self._bound = bound_seconds
        self._most = most
        self._most_of_tenant = most if most_of_tenant is None else most_of_tenant
        self._places: list[Place] = []  # of all routers
        self._by_key: dict[int, Place] = {}
        self.places = self.changes = 0

    def __len__(self) -> int:
        """Returns how many wait at this router."""
        return sum(1 for _ in self.waiting())

    @property
    def is_empty(self) -> bool:
        """Returns whether no router has a place, not even an empty one."""
        return not self._places

    @property
    def is_awaited(self) -> bool:
        """Returns whether anybody waits, at any router."""
        return any(not one.is_away for one in self._places)

    def waiting(self) -> Iterator[Place]:
        """Yields those that wait at this router, the next one first."""
        return (one for one in self._places if not one.is_away and not one.router)

    def __contains__(self, place: Place) -> bool:
        """Returns whether a place is in the line."""
        return place in self._places

    def join(
        self, key: int, tokens: float, level: int, tenant: int, now: float, follows: int = 0
    ) -> Place:
        """Returns the place of a request that has to wait; `NO_PLACE` if there is none for it.

        One that has a place already keeps its order. level: of its class, 0 for the one that goes
        first. The others are as in `Place`.
        """
        before = self._by_key.get(key)
        # another router gives up its own, and only once it is told of this one
        if before is not None and before.is_away and not before.router:
            self.remove(before)
        if not self._make_room(tenant, now):
            return NO_PLACE
        order = before.order if before is not None else (level, self._turn(level, tenant), now)
        place = Place(key, follows, tokens, tenant, order, now, now + self._bound)
        self._add(place)
        return place

    def _turn(self, level: int, tenant: int) -> int:
        """Returns the turn of a request that comes: behind its tenant's, not before who is next."""
        others = [one for one in self._places if one.order[0] == level]
        first = next((one.order[1] for one in others if not one.is_away), 1)
        last = max((one.order[1] for one in others if one.tenant == tenant), default=0)
        return max(first, last + 1)

    def _make_room(self, tenant: int, now: float) -> bool:
        """Returns whether there is a place for one more, if need be the one that is longest empty.

        Those who left a moment ago are expected back.
        """
        crowd = [one for one in self._places if not one.router]
        of_tenant = [one for one in crowd if one.tenant == tenant]
        if len(of_tenant) >= self._most_of_tenant:
            crowd = of_tenant
        elif len(crowd) < self._most:
            return True
        over = now + self._bound - RETURN_SECONDS
        empty = [one for one in crowd if one.is_away and one.until <= over]
        if not empty:
            return False
        self.remove(min(empty, key=lambda one: one.until))
        return True

    def leave(self, place: Place, now: float) -> None:
        """Keeps a place at which nobody waits any more."""
        place.is_away, place.until = True, now + self._bound
        self.changes += 1

    def let_in(self, room: float, most: float = inf) -> Sequence[Place]:
        """Removes the first that wait, as many as there is room for in tokens; returns them.

        Room for those that wait before them at other routers is left. most: tokens for which one
        waits at most, whatever it needs: otherwise one that needs more than there ever is would
        keep all back.
        """
        found: list[Place] = []
        for one in self._places:
            if one.is_away:
                continue
            needed = min(one.tokens, most)
            if needed > room:
                break
            room -= needed
            if not one.router:
                found.append(one)
        for one in found:
            self.remove(one)
        return found

    def overdue(self, now: float) -> Sequence[Place]:
        """Returns those that have waited for too long, and gives up empty places of that age."""
        late = [one for one in self._places if now >= one.until]
        for one in late:
            if one.is_away:
                self.remove(one)
        return [one for one in late if not one.is_away]

    def remove(self, place: Place) -> None:
        """Gives up a place."""
        self._places.remove(place)
        if self._by_key.get(place.key) is place:
            del self._by_key[place.key]
        if not place.router:
            self.places -= 1
            self.changes += 1

    def known(self, now: float) -> Iterator[KnownPlace]:
        """Yields the places of this router as others are to know them, the next one first."""
        for one in self._places:
            if not one.router:
                level, turn, came_at = one.order
                key, follows, tokens, tenant = one.key, one.follows, one.tokens, one.tenant
                waited = now - came_at
                yield KnownPlace(key, follows, tokens, tenant, level, turn, waited, one.is_away)

    def learn(self, router: str, places: Iterable[KnownPlace], now: float) -> None:
        """Notes the places of another router, in the place of those that were known of it.

        A place that was taken over here is not its any more.
        """
        for one in [one for one in self._places if one.router == router]:
            self.remove(one)
        for key, follows, tokens, tenant, level, turn, waited, is_away in places:
            if is_away and key in self._by_key:
                continue
            order = level, turn, now - waited
            self._add(Place(key, follows, tokens, tenant, order, now, inf, is_away, router))

    def _add(self, place: Place) -> None:
        insort(self._places, place, key=lambda one: one.order)
        if place.router:
            self._by_key.setdefault(place.key, place)
            return
        self._by_key[place.key] = place
        self.places += 1
        self.changes += 1
