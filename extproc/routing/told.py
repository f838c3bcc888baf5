"""Counts what another router tells of its own requests in the records of the workers.

It tells of the same workers again and again. Where a C compiler was at hand at installation,
extproc/native/told.c counts all but its first figures of a worker, in one call for each message.
Tests hold it equal to `Loads.record_report`, to the last bit.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from extproc.base.compiled import compiled_or

# Where a worker is, and anything else.
Place = tuple[str, Any]

# The time, the configured tokens per second, the window in seconds, and the most tokens that may
# count as sent in it, as in `extproc.routing.load_numbers.PlainNumbers.share`.
Rules = tuple[float, float, float, float]


class GaugesOf(Protocol):
    """`extproc.routing.load.Gauges`, or a message with the same attributes, which need not be
    copied.
    """

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


class FiguresOf(GaugesOf, Protocol):
    """A router's figures of a worker, and the worker's id."""

    @property
    def worker(self) -> int:
        """The worker's id in messages."""


def plain_count_later(told: tuple[FiguresOf, ...], *_: object) -> Sequence[FiguresOf]:
    """Counts none; returns those that are left to `Loads.record_report`: all."""
    return told


count_later = compiled_or("count_later", plain_count_later)
