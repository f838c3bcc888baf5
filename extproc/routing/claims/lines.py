"""The lines of all models, and what other routers tell of theirs.

Without it, several routers that share would let in too many at once, and who comes again through
another router would have lost his place.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from math import inf
from typing import NamedTuple

from extproc.routing.claims.line import KnownPlace, Line
from extproc.routing.claims.marks import root_key

# Most places that are told to other routers, the first ones of each line.
MOST_TOLD = 64


class ModelPlace(NamedTuple):
    """A place in the line of a model; the model by the key that all routers have for it."""

    model: int
    place: KnownPlace


class KnownLines(NamedTuple):
    """What a router tells of its lines.

    limits: which share of the caches live conversations may fill, by model; those that are known.
    places: the first ones, those that nobody waits at included.
    """

    limits: Mapping[int, float]
    places: Sequence[ModelPlace]


class Lines:
    """The lines, by model; times are seconds of one monotonic clock.

    secret: 64 random bits, the same for routers that share. The others are as in `Line`.
    is_current: whether what other routers tell arrives here; also true if there are none.
    """

    def __init__(
        self, secret: int, bound_seconds: float, most: int, most_of_tenant: int | None = None
    ) -> None:
        self._secret = secret
        self._bounds = bound_seconds, most, most_of_tenant
        self._lines: dict[int, Line] = {}
        self._keys: dict[str, int] = {}
        self._limits: dict[int, float] = {}
        self._others: dict[str, Mapping[int, float]] = {}  # their limits
        self._told_changes = 0
        self._past_changes = 0  # of limits, and of lines that are no more
        self.is_current = True

    def __len__(self) -> int:
        """Returns how many places this router has, empty ones included."""
        return sum(line.places for line in self._lines.values())

    @property
    def routers(self) -> int:
        """How many routers have told of their lines, this one included."""
        return 1 + len(self._others)

    def tenant_key(self, tenant: str) -> int:
        """Returns the key that all routers have for a tenant."""
        return root_key(self._secret, "tenant", tenant)

    def find(self, model: str) -> Line | None:
        """Returns the line of a model, None if there is none."""
        return self._lines.get(self._key(model))

    def of(self, model: str) -> Line:
        """Returns the line of a model, which may be new."""
        return self._line(self._key(model))

    def each(self) -> list[tuple[str, Line]]:
        """Returns the models that have a line, of those that were asked for, and their lines."""
        found = ((model, self._lines.get(key)) for model, key in self._keys.items())
        return [(model, line) for model, line in found if line is not None]

    def note_limit(self, model: str, share: float) -> None:
        """Notes which share of the caches live conversations may fill, as it was learned here."""
        key = self._key(model)
        if share != self._limits.get(key, inf):
            self._limits[key] = share
            self._past_changes += 1

    def limit(self, model: str) -> float:
        """Returns which share of the caches live conversations may fill; infinite if not known.

        It is what all routers have learned, on average: each sees some of the requests, and if each
        went by its own, who waits at the one that has learned less would never go on.
        """
        key = self._key(model)
        found = [each[key] for each in (self._limits, *self._others.values()) if key in each]
        return sum(found) / len(found) if found else inf

    def clear(self) -> None:
        """Gives up all places."""
        for key in list(self._lines):
            self._end(key)

    def tidy(self) -> None:
        """Gives up lines without places."""
        for key in [key for key, line in self._lines.items() if line.is_empty]:
            self._end(key)

    def take(self, now: float, *, is_whole: bool = False) -> KnownLines | None:
        """Returns what to tell to other routers; None if that is as it was told last.

        is_whole: whether it is told in any case, unless there is nothing.
        """
        changes = self._past_changes + sum(line.changes for line in self._lines.values())
        if changes == self._told_changes and not (is_whole and (len(self) or self._limits)):
            return None
        self._told_changes = changes
        return KnownLines(dict(self._limits), list(islice(self._known(now), MOST_TOLD)))

    def _known(self, now: float) -> Iterator[ModelPlace]:
        known = [
            (ModelPlace(model, place) for place in line.known(now))
            for model, line in self._lines.items()
        ]
        # in turns, so that a long line leaves room for those of other models
        for places in zip_longest(*known):
            yield from filter(None, places)

    def learn(self, router: str, known: KnownLines, now: float) -> None:
        """Notes what another router tells, in the place of what it told before."""
        by_model: defaultdict[int, list[KnownPlace]] = defaultdict(list)
        for model, place in known.places:
            by_model[model].append(place)
        self._others[router] = known.limits
        for model in self._lines.keys() | by_model.keys():
            self._line(model).learn(router, by_model[model], now)
        self.tidy()

    def forget(self, router: str, now: float) -> None:
        """Gives up the places of a router that is silent."""
        if router in self._others:
            self.learn(router, KnownLines({}, ()), now)
            del self._others[router]

    def _key(self, model: str) -> int:
        key = self._keys.get(model)
        if key is None:
            key = self._keys[model] = root_key(self._secret, "line", model)
        return key

    def _line(self, key: int) -> Line:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(*self._bounds)
        return line

    def _end(self, key: int) -> None:
        line = self._lines.pop(key)
        self._past_changes += line.changes + (line.places > 0)
