"""One stage for all tests, and a table of the cost of each failure."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.system.stage import Stage, staged
from tests.tables import Table, add_row


class Row(NamedTuple):
    """One line of the table.

    lost: requests not answered, though no worker had begun one. begun: not answered after a worker
    had begun. plain: the same two for an Envoy without ext_proc, where the failure affects it.
    steers_ms: milliseconds from the end of the failure until requests went to the worker that holds
    their prefix; None where that was not measured.
    """

    failure: str
    load: str
    requests: int
    lost: int
    begun: int
    plain: tuple[int, int] | None = None
    steers_ms: float | None = None
    note: str = ""

    @property
    def lost_by_us(self) -> int:
        """The requests lost beyond those that an Envoy without ext_proc lost."""
        return max(0, self.lost - (self.plain[0] if self.plain else 0))


TABLE = Table(
    "failures",
    f"{'failure':<46}{'load':<9}{'requests':>8}{'lost':>6}{'begun':>6}"
    f"{'without us':>12}{'steers':>8}  note",
    (
        "lost: not answered in full, though no worker had begun; begun: after a worker had.",
        "without us: both of an Envoy without ext_proc at the same time, where it is concerned.",
        "steers: milliseconds from the end of the failure (a process listens, or goes on) until",
        "requests reach the worker that holds their prefix again.",
    ),
)


# Starting all parts takes many seconds.
@pytest.fixture(scope="package")
def one_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("stage")) as stage:
        yield stage


@pytest.fixture
def stage(one_stage: Stage) -> Stage:
    """All parts run."""
    one_stage.heal()
    return one_stage


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """Prints its rows when all tests are done."""
    rows: list[Row] = []
    yield rows
    for row in rows:
        add_row(request.node, TABLE, _line(row))


def _line(row: Row) -> str:
    plain = f"{row.plain[0]}, {row.plain[1]}" if row.plain else "-"
    steers = "-" if row.steers_ms is None else f"{row.steers_ms:.0f}"
    return (
        f"{row.failure:<46}{row.load:<9}{row.requests:>8}{row.lost:>6}"
        f"{row.begun:>6}{plain:>12}{steers:>8}  {row.note}".rstrip()
    )
