import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.commands.look import PLAIN, Look, Tone, cut, look_of, width

BRIGHT = Look(has_colours=True, marks="#.")


class Terminal(io.StringIO):
    """A terminal of an encoding."""

    encoding = "UTF-8"

    def isatty(self) -> bool:
        return True


class Latin(Terminal):
    encoding = "iso-8859-1"


@pytest.mark.parametrize(
    ("out", "environment", "look"),
    [
        (io.StringIO(), {}, PLAIN),
        (Terminal(), {}, Look(has_colours=True, marks="█░")),
        (Terminal(), {"NO_COLOR": "1"}, Look(marks="█░")),
        (Terminal(), {"NO_COLOR": ""}, Look(has_colours=True, marks="█░")),
        (Terminal(), {"TERM": "dumb"}, Look(marks="█░")),
        (Latin(), {}, Look(has_colours=True, marks="#.")),
    ],
)
def test_look_is_plain_but_for_a_terminal_that_may_have_colours(
    out: io.StringIO, environment: dict[str, str], look: Look
) -> None:
    assert look_of(out, environment) == look


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
