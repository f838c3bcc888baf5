"""The faults that a part of the router sees."""

from collections.abc import Iterable
from typing import Protocol

from extproc.base.fault import Fault


class FindsFaults(Protocol):
    """A part that is a source of faults."""

    def faults(self) -> Iterable[Fault | None]:
        """Returns the present ones."""


def found(part: FindsFaults) -> list[Fault]:
    """Returns the present faults of a part, without the pauses in which others have a turn."""
    return [one for one in part.faults() if one is not None]


def said(part: FindsFaults) -> str:
    """Returns the present faults of a part, a line each; "" if there are none."""
    return "\n".join(map(str, found(part)))
