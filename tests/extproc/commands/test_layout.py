import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.commands.layout import PLAIN, Layout, Tone, cut, layout_of, width

BRIGHT = Layout(has_colours=True, marks="#.")


class Terminal(io.StringIO):
    """A terminal of an encoding."""

    encoding = "UTF-8"

    def isatty(self) -> bool:
        return True


class Latin(Terminal):
    encoding = "iso-8859-1"


@pytest.mark.parametrize(
    ("out", "environment", "layout"),
    [
        (io.StringIO(), {}, PLAIN),
        (Terminal(), {}, Layout(has_colours=True, marks="█░")),
        (Terminal(), {"NO_COLOR": "1"}, Layout(marks="█░")),
        (Terminal(), {"NO_COLOR": ""}, Layout(has_colours=True, marks="█░")),
        (Terminal(), {"TERM": "dumb"}, Layout(marks="█░")),
        (Latin(), {}, Layout(has_colours=True, marks="#.")),
    ],
)
def test_layout_is_plain_but_for_a_terminal_that_may_have_colours(
    out: io.StringIO, environment: dict[str, str], layout: Layout
) -> None:
    assert layout_of(out, environment) == layout


def test_bar_has_as_many_full_cells_as_the_share() -> None:
    assert [BRIGHT.bar(share, 4) for share in (-1, 0, 0.5, 1, 2)] == [
        "....",
        "....",
        "##..",
        "####",
        "####",
    ]
    assert PLAIN.bar(0.5, 4) == ""


def test_tone_is_shown_only_with_colours() -> None:
    assert BRIGHT.tone("a", Tone.BAD) == "\x1b[31ma\x1b[0m"
    assert BRIGHT.tone("", Tone.BAD) == ""
    assert PLAIN.tone("a", Tone.BAD) == "a"


@given(
    st.lists(st.tuples(st.text("abc ", max_size=5), st.sampled_from([None, *Tone]))),
    st.integers(1, 12),
)
def test_cut_keeps_the_tones_and_as_much_text_as_has_room(
    parts: list[tuple[str, Tone | None]], columns: int
) -> None:
    text = "".join(part for part, _ in parts)
    line = "".join(part if tone is None else BRIGHT.tone(part, tone) for part, tone in parts)
    seen = cut(line, columns)
    assert width(line) == len(text)
    assert width(seen) == min(len(text), columns)
    assert seen.count("\x1b[0m") == line.count("\x1b[0m")
    assert seen == line if len(text) <= columns else seen.endswith("~")
