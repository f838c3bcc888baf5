"""The draws of random places, as extproc/native/columns.c makes them."""

from collections.abc import Callable, Iterator, Sequence

Random = Callable[[], float]
Ranks = Sequence[float] | Sequence[tuple[float, float]]

_MASK = 2**64 - 1

# As many seeds as there are numbers that `random.random` returns.
_SEEDS = 2**53


def plain_numbers(seed: int) -> Iterator[int]:
    """Yields random numbers of 64 bits after a seed.

    Source: SplitMix64 (Steele, Lea and Flood: Fast splittable pseudorandom number generators,
    2014).
    """
    while True:
        seed = seed + 0x9E3779B97F4A7C15 & _MASK
        number = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
        yield number ^ number >> 31


def _drawn_numbers(random: Random) -> Iterator[int]:
    """Yields random numbers, of which one of `random` is the seed."""
    return plain_numbers(int(random() * _SEEDS))


def plain_drawn(places: Sequence[int], count: int, random: Random) -> list[int]:
    """Returns `count` of these places, in the order in which they are drawn.

    Raises:
        ValueError: there are not so many.
    """
    number = len(places)
    if not 0 <= count <= number:
        raise ValueError("not so many places")
    numbers = _drawn_numbers(random)
    found: dict[int, None] = {}
    while len(found) < count:
        found[next(numbers) * number >> 64] = None
    return [places[at] for at in found]


def plain_lowest(ranks: Ranks, count: int, random: Random) -> list[int]:
    """Returns the indices of the lowest ranks, at most `count`; ties are broken at random.

    Without ties among them, no random number is drawn.
    """
    first = sorted(ranks)[: count + 1]
    if len(set(first)) == len(first):
        return [ranks.index(rank) for rank in first[:count]]
    numbers = _drawn_numbers(random)
    rows = sorted([(rank, next(numbers), place) for place, rank in enumerate(ranks)])
    return [place for _, _, place in rows[:count]]
