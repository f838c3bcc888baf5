"""Draws: random places among many.

They are compiled if a C compiler was available (extproc/native/columns.c); the `plain_` functions
do the same in Python, with the same random numbers, and tests compare the two.
"""

from collections.abc import Callable, Sequence

__all__ = ["drawn", "lowest", "plain_drawn", "plain_lowest"]

Random = Callable[[], float]
Ranks = Sequence[float] | Sequence[tuple[float, float]]


def plain_drawn(places: Sequence[int], count: int, random: Random) -> list[int]:
    """Returns `count` different ones of these places, in the order in which they are drawn.

    count: at most as many as there are.
    """
    number = len(places)
    found: dict[int, None] = {}
    while len(found) < count:
        found[places[int(random() * number)]] = None
    return list(found)


def plain_lowest(ranks: Ranks, count: int, random: Random) -> list[int]:
    """Returns the indices of the lowest ranks, at most `count`; ties are broken at random.

    Without ties among them, no random number is drawn.
    """
    first = sorted(ranks)[: count + 1]
    if len(set(first)) == len(first):
        return [ranks.index(rank) for rank in first[:count]]
    rows = sorted([(rank, random(), place) for place, rank in enumerate(ranks)])
    return [place for _, _, place in rows[:count]]


try:
    from extproc._core import drawn
    from extproc._core import lowest as _lowest_numbers
except ImportError:  # there was no C compiler at installation
    drawn, lowest = plain_drawn, plain_lowest
else:

    def lowest(ranks: Ranks, count: int, random: Random) -> list[int]:
        """Does the same as `plain_lowest`; only numbers are ranked in C."""
        found = _lowest_numbers(ranks, count, random)
        return plain_lowest(ranks, count, random) if found is None else found
