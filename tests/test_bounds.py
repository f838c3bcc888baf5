"""The page of bounds: each row says who may take how much, and names a test that exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "internals" / "bounds.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and "::" in line
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0])[:40])
def test_bound_is_complete_and_its_test_exists(row: list[str]) -> None:
    _, bound, share, effect, named = row
    assert all((bound, share, effect))
    file, _, name = named.strip("`").partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert re.search(rf"def {name}\(" if name else "def test_", text), named


def test_all_shared_bounds_have_rows() -> None:
    assert len(ROWS) >= 19
