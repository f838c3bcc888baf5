from array import array

import pytest

from extproc.tokenizing.media_parts import MediaParts, before_added, parts_of
from kvstate.overlap import Tokens


def ids(*tokens: int) -> Tokens:
    return array("I", tokens)


START, PAD, END = 90, 91, 92
ADDED = ids(START, PAD, END)


@pytest.mark.parametrize(
    ("whole", "added", "parts"),
    [
        (ids(1, 90, 91, 92, 2), [ADDED], MediaParts((ids(1), ids(2)), (ADDED,))),
        (ids(90, 7, 91, 92), [ADDED], MediaParts((ids(), ids()), (ids(90, 7, 91, 92),))),
        (
            ids(1, 91, 91, 2),
            [ids(91), ids(91)],
            MediaParts((ids(1), ids(), ids(2)), (ids(91), ids(91))),
        ),
    ],
)
def test_parts_are_cut_at_what_is_written_for_items(
    whole: Tokens, added: list[Tokens], parts: MediaParts
) -> None:
    assert parts_of(whole, added) == parts


@pytest.mark.parametrize("whole", [ids(1, 2), ids(90, 91), ids(91, 90, 92), ids(90, 91, 92, 91)])
def test_parts_are_unknown_if_something_else_is_written(whole: Tokens) -> None:
    assert parts_of(whole, [ADDED]) is None


def test_ids_before_any_that_are_written_are_those_of_the_text() -> None:
    assert before_added(ids(1, 2, 92, 3), [ADDED]) == ids(1, 2)
    assert before_added(ids(1, 2), [ADDED]) == ids(1, 2)
