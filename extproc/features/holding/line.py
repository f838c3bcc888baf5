"""The line of those who wait for room: who is next, and who keeps a place without waiting.

Who came first goes first, among requests of one class; tenants of one class take turns. A place
belongs to a conversation, not to a connection: whoever leaves and comes again keeps it for a while,
and those behind do not wait for him meanwhile.
"""

from bisect import insort
from collections.abc import Iterator, Sequence

import msgspec

# What places are ordered by: the class, the tenant's turn, the number of the arrival.
Order = tuple[int, int, int]


class Place(msgspec.Struct, eq=False):
    """One conversation's place; times are those of the caller's clock, in seconds.

    key: of its request. tokens: the room that it needs. order: lower ones go first. since: when it
    came. until: when its wait ends, or its empty place is given up. is_away: whether nobody waits
    there now.
    """

    key: int
    tokens: float
    tenant: str
    order: Order
    since: float
    until: float
    is_away: bool = False


# The place of one for whom there is none.
NO_PLACE = Place(0, 0.0, "", (0, 0, 0), 0.0, 0.0, is_away=True)


class Line:
    """Those who wait for room.

    bound_seconds: how long one waits at most, and how long an empty place is kept. most: how many
    places there are at most.
    """

    def __init__(self, bound_seconds: float, most: int) -> None:
        self._bound = bound_seconds
        self._most = most
        self._places: list[Place] = []
        self._by_key: dict[int, Place] = {}
        self._arrivals = 0
        self._turn = 1  # of the one that went on last
        self._turns: dict[str, int] = {}  # the last one of each tenant that has a place

    @property
    def places(self) -> int:
        """Returns how many places there are, empty ones included."""
        return len(self._places)

    def __len__(self) -> int:
        """Returns how many wait."""
        return sum(1 for _ in self.waiting())

    def waiting(self) -> Iterator[Place]:
        """Yields those that wait, the next one first."""
        return (one for one in self._places if not one.is_away)

    def __contains__(self, place: Place) -> bool:
        """Returns whether a place is in the line."""
        return place in self._places

    def join(self, key: int, tokens: float, level: int, tenant: str, now: float) -> Place:
        """Returns the place of a request that has to wait; `NO_PLACE` if the line is full.

        One that has a place already keeps its order. level: of its class, 0 for the one that goes
        first.
        """
        before = self._by_key.get(key)
        if before is not None and before.is_away:
            self._drop(before)
        if len(self._places) >= self._most:
            return NO_PLACE
        if before is not None:
            order = before.order
        else:
            turn = max(self._turn, self._turns.get(tenant, 0) + 1)
            self._arrivals += 1
            order = level, turn, self._arrivals
        self._turns[tenant] = max(order[1], self._turns.get(tenant, 0))
        place = Place(key, tokens, tenant, order, now, now + self._bound)
        insort(self._places, place, key=lambda one: one.order)
        self._by_key[key] = place
        return place

    def leave(self, place: Place, now: float) -> None:
        """Keeps a place at which nobody waits any more."""
        place.is_away, place.until = True, now + self._bound

    def let_in(self, room: float) -> Sequence[Place]:
        """Removes the first that wait, as many as there is room for in tokens; returns them."""
        found: list[Place] = []
        for one in self.waiting():
            if one.tokens > room:
                break
            room -= one.tokens
            found.append(one)
        for one in found:
            self.remove(one)
        return found

    def overdue(self, now: float) -> Sequence[Place]:
        """Returns those that have waited for too long, and gives up empty places of that age."""
        late = [one for one in self._places if now >= one.until]
        for one in late:
            if one.is_away:
                self._drop(one)
        return [one for one in late if not one.is_away]

    def remove(self, place: Place) -> None:
        """Gives up the place of a request that goes on."""
        self._turn = max(self._turn, place.order[1])
        self._drop(place)

    def _drop(self, place: Place) -> None:
        self._places.remove(place)
        if self._by_key.get(place.key) is place:
            del self._by_key[place.key]
        if all(one.tenant != place.tenant for one in self._places):
            self._turns.pop(place.tenant, None)
