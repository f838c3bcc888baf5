"""The page of the code's words: few, each once, and what stands for them is there."""

import re
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "internals" / "words.md"
ROW = re.compile(r"^\| ([a-z ]+) \| (.+) \| (.+) \|$", re.MULTILINE)
MOST_WORDS = 30


def rows() -> dict[str, tuple[str, str]]:
    found = [one.groups() for one in ROW.finditer(PAGE.read_text())]
    assert len({word for word, _, _ in found}) == len(found)
    return {word: (meaning, stands) for word, meaning, stands in found if word != "word"}


def defined_in(room: Path) -> set[str]:
    texts = [path.read_text() for path in room.rglob("*.py")]
    return {
        name
        for text in texts
        for name in re.findall(r"^(?:class|def|    def) (\w+)|^ {4}(\w+): ", text, re.MULTILINE)
        for name in name
    }


NAMES = defined_in(ROOT / "extproc") | defined_in(ROOT / "kvstate")


def test_words_are_few_and_each_has_a_meaning() -> None:
    assert 0 < len(rows()) <= MOST_WORDS
    assert all(meaning.endswith((".", ")")) for meaning, _ in rows().values())


@pytest.mark.parametrize("word", sorted(rows()))
def test_what_stands_for_a_word_is_there(word: str) -> None:
    for name in re.findall(r"`([^`]+)`", rows()[word][1]):
        if "/" in name:
            assert any((ROOT / room / name).exists() for room in ("", "extproc", "kvstate")), name
        else:
            last = [part for part in name.split(".") if part[0].isupper()] or [name]
            assert last[-1] in NAMES, name
            assert name.rpartition(".")[2] in NAMES, name
            module = "/".join(takewhile(str.islower, name.split(".")[:-1]))
            places = [ROOT / room / f"{module}.py" for room in ("", "extproc")]
            assert not module or any(place.exists() for place in places), name
