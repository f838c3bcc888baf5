"""Figures that convince are those of the benchmarks: README's tables, and the hash's page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results.md"
PAGES = [ROOT / "README.md", ROOT / "docs" / "why-not-hash.md"]

# What a table says of versions is compared elsewhere.
NOT_MEASURED = ("| versions |",)

# A number that is no part of a name, such as p90, or of a release.
_NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w-])(?!\.\d)")
_TARGET = re.compile(r"\]\([^)]*\)|`[^`]*`")
_TO = re.compile(r"(?<=\d)-(?=\d)")


def tables_of(text: str) -> list[list[str]]:
    """The tables of a page, each as its lines."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [table.splitlines() for table in found]


def figures_in(text: str) -> list[str]:
    """The numbers of a text; both of an interval."""
    return [one.rstrip(",") for one in _NUMBER.findall(_TO.sub(" ", text))]


def cells_of(page: Path) -> list[str]:
    """The cells of a page's tables of figures, without first column, heads, links and code."""
    tables = [one for one in tables_of(page.read_text()) if not one[0].endswith(NOT_MEASURED)]
    rows = [_TARGET.sub("", row) for table in tables for row in table[2:]]
    return ["|".join(row.split("|")[2:]) for row in rows]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_of_tables_are_in_the_results_of_the_benchmarks(page: Path) -> None:
    known = set(figures_in(RESULTS.read_text()))
    assert [one for cell in cells_of(page) for one in figures_in(cell) if one not in known] == []


def test_readme_has_figures_to_compare() -> None:
    figures = [one for cell in cells_of(PAGES[0]) for one in figures_in(cell)]
    assert len(figures) > 10


def test_figures_are_found_in_every_form_in_which_tables_write_them() -> None:
    text = "0.80 s, 1,899 us; p90 vLLM 0.9 (3.39-4.27) 2x 0 of 207, 63 %"
    assert figures_in(text) == ["0.80", "1,899", "0.9", "3.39", "4.27", "0", "207", "63"]


def test_readme_is_short() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= 120
