from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.features.misses import locating
from extproc.features.misses.locating import MOST_IN_VAIN, MOST_MISSING, locate
from extproc.requests.parts import Part, Place

SYSTEM = Part(Place.SYSTEM, 0, ("You help. It is noon.",), "system")
TOOLS = [Part(Place.TOOLS, n, (name, "{}")) for n, name in enumerate(("Read", "Write"))]
TURNS = [
    Part(Place.TURN, 0, ("Look at it, please.",), "user"),
    Part(Place.TURN, 1, ("Hm.", "Read"), "assistant"),
    Part(Place.TURN, 2, ("The file says no.",), "tool"),
]
TEXT = (
    "<s>system\nYou help. It is noon.\n# Tools\n[{name: Read}, {name: Write}]</s>"
    "<s>user\nLook at it, please.</s><s>assistant\nHm.<call>Read</call></s>"
    "<s>tool\nThe file says no.</s><s>assistant\n"
)


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("noon", (Place.SYSTEM, 0, True)),
        ("Read}", (Place.TOOLS, 0, True)),
        ("Write", (Place.TOOLS, 1, True)),
        ("please", (Place.TURN, 0, True)),
        ("</s><s>assistant\nHm", (Place.TURN, 0, False)),
        ("The file", (Place.TURN, 2, True)),
    ],
)
def test_place_in_a_prompt_is_that_of_the_part_that_stands_there(
    at: str, expected: tuple[Place, int, bool]
) -> None:
    start = TEXT.index(at)
    spot = locate([*TOOLS, SYSTEM, *TURNS], TEXT, start, start + 1)
    assert spot.part is not None
    assert (spot.part.place, spot.part.index, spot.is_written) == expected


def test_part_that_begins_within_a_place_is_preferred() -> None:
    start = TEXT.index("}, {name: Write")
    spot = locate([*TOOLS, SYSTEM, *TURNS], TEXT, start, start + len("}, {name: Write}"))
    assert spot.part is TOOLS[1]
    assert spot.is_written


def test_change_in_a_text_is_of_its_part_however_long_it_is() -> None:
    spot = locate([*TOOLS, SYSTEM, *TURNS], TEXT, TEXT.index("help"), TEXT.index("Hm"))
    assert spot.part is SYSTEM


def test_nothing_stands_before_the_first_part() -> None:
    spot = locate([*TOOLS, SYSTEM, *TURNS], TEXT, 0, 3)
    assert (spot.part, spot.is_written) == (None, False)
    assert locate([], TEXT, 5, 6).part is None


@pytest.mark.parametrize(("place", "said"), [(Place.TURN, "The file"), (Place.TOOLS, "Write")])
def test_looking_in_vain_is_bounded_whatever_a_request_says(place: Place, said: str) -> None:
    long, many = "a" * 400_000, MOST_IN_VAIN // 400_000 + 2
    text = TEXT.replace("noon.", f"noon.{long}")
    start, wanted = text.index(said), [*TOOLS, *TURNS][-1 if place is Place.TURN else 1]

    def located(absent: int) -> Part | None:
        texts = [f"{'a' * 40}{number}" for number in range(absent)]
        if place is Place.TOOLS:
            parts = [*(Part(place, 9, (name,)) for name in texts), wanted, SYSTEM, *TURNS]
        else:
            parts = [Part(place, 9, tuple(texts), "user"), wanted]
        return locate(parts, text, start, start + 1).part

    assert located(3) is wanted
    assert located(many) is not wanted


class Watched(str):
    """A text that notes how many of its characters are looked through in vain at each time."""

    __slots__ = ("in_vain",)
    in_vain: list[int]

    def find(self, *sought: Any) -> int:
        at, (_, start, end) = super().find(*sought), sought
        if at < 0:
            self.in_vain.append(max(0, end - start))
        return at


TEXTS = st.lists(st.text("ab", min_size=20, max_size=60), min_size=4).map(tuple)
PARTS = st.builds(Part, st.sampled_from(Place), st.just(0), TEXTS)


@given(st.lists(PARTS, min_size=1), st.text("ab", min_size=50, max_size=200))
def test_nothing_is_looked_for_once_the_bound_is_reached(parts: list[Part], prompt: str) -> None:
    text = Watched(prompt)
    text.in_vain = []
    with mock.patch.object(locating, "MOST_IN_VAIN", 100):
        locate(parts, text, 30, 31)
    assert sum(text.in_vain[:-1]) < 100


def test_parts_that_the_template_does_not_write_are_left_out() -> None:
    missing = [Part(Place.TURN, n, ("", f"absent {n}"), "user") for n in range(MOST_MISSING)]
    last = TEXT.index("The file")
    few = locate([SYSTEM, *missing[1:], TURNS[2]], TEXT, last, last + 1)
    assert few.part is TURNS[2]
    many = locate([SYSTEM, *missing, TURNS[2]], TEXT, last, last + 1)
    assert many.part is SYSTEM


def test_tool_is_not_where_others_speak_of_it() -> None:
    system = Part(Place.SYSTEM, 0, ("Use Write only after Read.",), "system")
    tools = '[{"name": "Read", "is": "before \\"Write\\""}, {"name": "Write"}]'
    text = f"Use Write only after Read. {tools}"
    for at, index in (("before", 0), ('Write"}]', 1)):
        start = text.index(at)
        spot = locate([*TOOLS, system], text, start, start + 1)
        assert spot.part is TOOLS[index]
        assert spot.is_written
    start = text.index("only")
    assert locate([*TOOLS, system], text, start, start + 1).part is system


def test_tools_may_stand_before_the_system() -> None:
    text = "[Read, Write] You help. It is noon."
    start = text.index("Write")
    assert locate([*TOOLS, SYSTEM], text, start, start + 1).part is TOOLS[1]


def test_short_words_of_a_turn_are_not_looked_for_before_their_turn() -> None:
    text = TEXT[: TEXT.index("Look")]
    start = text.index("Read")
    spot = locate([*TOOLS, SYSTEM, *TURNS], text, start, start + 1)
    assert spot.part is TOOLS[0]


def test_tool_without_a_name_stands_nowhere() -> None:
    nameless = Part(Place.TOOLS, 0, ("", "{}"))
    spot = locate([nameless, SYSTEM], TEXT, TEXT.index("Read}"), TEXT.index("Read}") + 1)
    assert spot.part is SYSTEM
    assert locate([Part(Place.TOOLS, 0, ()), SYSTEM], TEXT, 0, 1).part is None
