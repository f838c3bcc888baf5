"""How text looks on a terminal: its colours (ECMA-48's SGR), bars, and its width with both.

Output that is no terminal gets neither. NO_COLOR (no-color.org), if not empty, and a terminal that
is `dumb` get no colours.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, TextIO


class Tone(StrEnum):
    """What a colour says, as SGR's parameter."""

    GOOD = "32"
    FAIR = "33"
    BAD = "31"
    FAINT = "2"
    STRONG = "1"


_TONED = re.compile(r"\x1b\[[0-9;]*m")
_PLAIN = "\x1b[0m"


class Layout(NamedTuple):
    """How to show text. marks: of the full and the empty part of a bar, "" for no bars."""

    has_colours: bool = False
    marks: str = ""

    def tone(self, text: str, tone: Tone) -> str:
        """Returns the text in a tone, if colours are shown; the text must be plain."""
        return f"\x1b[{tone}m{text}{_PLAIN}" if self.has_colours and text else text

    def bar(self, share: float, cells: int) -> str:
        """Returns a bar of so many cells for a share of 0 to 1; "" if bars are not shown."""
        if not self.marks:
            return ""
        full = round(min(1.0, max(0.0, share)) * cells)
        return self.marks[0] * full + self.marks[1] * (cells - full)


PLAIN = Layout()


def layout_of(out: TextIO, environment: Mapping[str, str]) -> Layout:
    """Returns how to show text on an output."""
    if not out.isatty():
        return PLAIN
    can_draw = (getattr(out, "encoding", None) or "").lower().replace("-", "") == "utf8"
    dull = bool(environment.get("NO_COLOR")) or environment.get("TERM") == "dumb"
    return Layout(has_colours=not dull, marks="█░" if can_draw else "#.")


def width(text: str) -> int:
    """Returns how many cells a text takes: its tones take none."""
    return len(_TONED.sub("", text)) if "\x1b" in text else len(text)


def cut(line: str, columns: int) -> str:
    """Returns the line, shortened to so many columns with a mark at its end if needed."""
    if width(line) <= columns:
        return line
    kept, room, at = "", columns - 1, 0
    for toned in _TONED.finditer(line):
        part = line[at : toned.start()][:room]
        kept, room, at = f"{kept}{part}{toned[0]}", room - len(part), toned.end()
    return f"{kept}{line[at:][:room]}~"
