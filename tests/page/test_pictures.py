"""The pictures of the documentation: which there are, and that the command makes them."""

import re
import struct
from pathlib import Path

import pytest

from tests.documented import PAGES as PAGES_OF_DOCS
from tests.documented import ROOT
from tests.page import pictures
from tests.page.browser import CHROMIUM, DRIVER, MISSING
from tests.page.pictures import PAGES, REPORT, names

DOCS = ROOT / "docs"


def size_of(picture: bytes) -> tuple[int, int]:
    """The width and height of a PNG, as its first chunk has them."""
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


def test_documentation_has_the_pictures_that_the_command_makes_and_shows_each() -> None:
    assert {file.name for file in DOCS.glob("*.png")} == set(names())
    text = "".join(page.read_text() for page in PAGES_OF_DOCS)
    assert set(re.findall(r"[\w-]+\.png", text)) == set(names())
    assert "python -m tests.page.pictures docs" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", names())
def test_picture_in_the_documentation_has_its_size(name: str) -> None:
    size = (PAGES | REPORT)[name.removesuffix(".png").removesuffix("-dark")]
    assert size_of((DOCS / name).read_bytes()) == size


@pytest.mark.slow
def test_command_makes_every_picture_in_light_and_dark(tmp_path: Path) -> None:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(MISSING)
    pictures.main(tmp_path, steps=[(50, 3), (100, 3)], think_seconds=0.05)
    assert {file.name for file in tmp_path.iterdir()} == set(names())
    for name, size in (PAGES | REPORT).items():
        light, dark = (tmp_path / f"{name}{end}.png" for end in ("", "-dark"))
        assert size_of(light.read_bytes()) == size_of(dark.read_bytes()) == size
        assert light.read_bytes() != dark.read_bytes()
