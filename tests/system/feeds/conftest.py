"""Prints the effects of this run's faults as a table."""

from collections.abc import Iterator

import pytest

from tests.system.feeds.watch import Row
from tests.tables import Table, add_row

TABLE = Table(
    "faults",
    f"{'fault':<42}{'transport':<16}{'known':>8}{'right':>8}{'exact':>8}{'wrong':>6}  recovered by",
    (
        "Milliseconds since the fault. known: the first evidence was handed on by our socket.",
        "right: nothing is certain that the worker does not hold, and what is not known is said.",
        "exact: what is certain is all that it holds; never, within this test, says so until then.",
        "wrong: looks, every half millisecond, at which too much was credited after that; -: the",
        "credits were compared once, when all had settled.",
    ),
)


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """Prints its rows when all tests are done."""
    rows: list[Row] = []
    yield rows
    for row in rows:
        add_row(request.node, TABLE, _line(row))


def _line(row: Row) -> str:
    exact = "never" if row.known_ms and row.exact_ms is None else _shown(row.exact_ms)
    wrong = "-" if row.wrong is None else str(row.wrong)
    return (
        f"{row.fault:<42}{row.transport:<16}{_shown(row.known_ms):>8}{_shown(row.right_ms):>8}"
        f"{exact:>8}{wrong:>6}  {row.how}"
    )


def _shown(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.1f}"
