"""A column over all workers of a fleet, of which only some were compared."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

Value = TypeVar("Value")
Value_co = TypeVar("Value_co", covariant=True)


class Rows(Protocol[Value_co]):
    """A value for each worker that was compared."""

    def __len__(self) -> int:
        """Returns how many there are."""

    def __getitem__(self, at: int, /) -> Value_co:
        """Returns one of them."""

    def __iter__(self) -> Iterator[Value_co]:
        """Returns them, one by one."""


class Spread(Sequence[Value | None]):
    """A value for each worker, None for those that were not compared; it is made when it is read.

    places: of the compared ones, among all. own: their values. count: of all workers.
    """

    __slots__ = ("_column", "_count", "_own", "_places")

    def __init__(self, places: Sequence[int], own: Rows[Value], count: int) -> None:
        self._places = places
        self._own = own
        self._count = count
        self._column: list[Value | None] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        if self._column is None:
            self._column = [None] * self._count
            for place, value in zip(self._places, self._own, strict=True):
                self._column[place] = value
        return self._column[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment] # as a list has none
