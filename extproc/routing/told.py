"""Counts what another router tells of its own requests in the records of the workers.

It tells of the same workers again and again. Where a C compiler was at hand at installation,
extproc/native/told.c counts all but its first figures of a worker, in one call for each message.
Tests hold it equal to `Loads.record_report`, to the last bit.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

# Where a worker is, and anything else.
Place = tuple[str, Any]

# The time, the configured tokens per second, the window in seconds, and the most tokens that may
# count as sent in it, as in `extproc.routing.load_numbers.PlainNumbers.share`.
Rules = tuple[float, float, float, float]


class FiguresOf(Protocol):
    """A router's figures of a worker: those of `extproc.routing.load.Gauges`, and its id."""

    @property
    def worker(self) -> int:
        """The worker's id in messages."""

    @property
    def in_flight(self) -> int:
        """See `Gauges`, also for the others."""

    @property
    def booked_tokens(self) -> int:
        """Tokens of the requests in flight."""

    @property
    def sent_tokens(self) -> int:
        """Tokens of all requests so far."""

    @property
    def backlog_tokens(self) -> int:
        """Tokens in the queue."""

    @property
    def lately_tokens(self) -> int:
        """Tokens sent lately."""


def plain_count_later(told: tuple[FiguresOf, ...], *_: object) -> Sequence[FiguresOf]:
    """Counts none; returns those that are left to `Loads.record_report`: all."""
    return told


if TYPE_CHECKING:
    count_later = plain_count_later
else:
    try:
        from extproc._core import count_later
    except ImportError:  # there was no C compiler at installation
        count_later = plain_count_later
