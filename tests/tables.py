"""Tables that tests add rows to, printed when all are done."""

import json
from typing import NamedTuple

import pytest

_NAME = "row of a table"


class Table(NamedTuple):
    """header: the line above its rows. notes: the lines below."""

    title: str
    header: str
    notes: tuple[str, ...]


def add_row(test: pytest.Item, table: Table, row: str) -> None:
    """Adds a row to the report of a test, whichever process the test runs in."""
    test.user_properties.append((_NAME, json.dumps([table.title, table.header, table.notes, row])))


class Printer:
    """Collects the rows of all tests, and prints their tables."""

    def __init__(self) -> None:
        self._rows: dict[Table, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the rows of one test."""
        if report.when != "teardown":
            return
        for name, value in report.user_properties:
            if name == _NAME:
                title, header, notes, row = json.loads(str(value))
                self._rows.setdefault(Table(title, header, tuple(notes)), []).append(row)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the tables."""
        for table, rows in self._rows.items():
            terminalreporter.section(table.title)
            for line in (table.header, *rows, *table.notes):
                terminalreporter.write_line(line)
