"""Runs a benchmark: its options, its rows as they come, what is missing here, and its exit status.

Every benchmark is `python benchmarks/NAME.py [--quick | --smoke] [--json FILE]`. It prints each row
when it is measured, then all rows as a table, and ends with status 1 if a goal is not met. With
--smoke it measures each kind of row once, in seconds, to show that it still runs: its figures mean
nothing, no goal is judged, and what is missing is only named.
"""

import argparse
import dataclasses
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from measure import CannotRunError, Row, missed, table

T = TypeVar("T")


def arguments(about: str | None, quick: str) -> argparse.ArgumentParser:
    """Returns the command-line parser of a benchmark; quick: help of --quick."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=formatter)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help=quick)
    amount.add_argument("--smoke", action="store_true", help="each row once, and no goal judged")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file too")
    return parser


class Run:
    """One run of a benchmark. options: those of the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []
        self.could_run = True

    def amount(self, smoke: T, quick: T, full: T) -> T:
        """Returns how much is to be measured."""
        return smoke if self.options.smoke else quick if self.options.quick else full

    def add(self, rows: Iterable[Row]) -> None:
        """Prints measured rows, and keeps them for the table."""
        for row in rows:
            own = dataclasses.replace(row, goal=None) if self.options.smoke else row
            self.rows.append(own)
            ratio = "" if own.ratio is None else f"  ratio {own.ratio}"
            print(f"{own.what}: {own.ours}  reference {own.reference}{ratio}", flush=True)

    @property
    def status(self) -> int:
        """The exit status: 1 if a goal is not met."""
        if self.options.smoke:
            return 0
        return int(not self.could_run or any(row.met is False for row in self.rows))


@contextmanager
def run(parser: argparse.ArgumentParser, how: str = "") -> Iterator[Run]:
    """Runs a benchmark, prints its table, writes its rows, and exits with its status.

    how: how the table was made.
    """
    one, began = Run(parser.parse_args()), time.monotonic()
    try:
        yield one
    except CannotRunError as error:
        one.could_run = False
        missed(error)
    if one.rows:
        print(f"\n{table(one.rows)}\n\n{how}".rstrip())
    machine = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    took = time.monotonic() - began
    print(f"{machine}, load {os.getloadavg()[0]:.1f}; took {took:.0f} s")
    if one.options.json:
        rows = [row.as_json() for row in one.rows]
        one.options.json.write_text(json.dumps(rows, indent=1) + "\n")
    raise SystemExit(one.status)
