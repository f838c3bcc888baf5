import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.renderers.segments import EDGE, MAX_CONTROLS, ControlMarks, Segment

MARKS = ControlMarks([200_006, 7, 200_012, 7])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
SEGMENTS: st.SearchStrategy[list[Segment]] = st.lists(
    TEXTS | st.sampled_from([7, 200_006, 200_012])
)


@given(SEGMENTS)
def test_split_returns_the_joined_segments(segments: list[Segment]) -> None:
    assert MARKS.split(MARKS.joined(segments)) == segments


@given(SEGMENTS, SEGMENTS)
def test_joined_segments_begin_with_the_join_of_the_first(
    first: list[Segment], more: list[Segment]
) -> None:
    assert MARKS.joined([*first, *more]).startswith(MARKS.joined(first))


def test_empty_texts_make_no_difference() -> None:
    assert MARKS.joined(["", 7, "", "a", "", "b", ""]) == MARKS.joined([7, "a", "b"])


@pytest.mark.parametrize("text", [EDGE, MARKS.mark(7), "\ud801", "é\udfff"])
def test_text_of_a_client_never_holds_a_mark(text: str) -> None:
    with pytest.raises(RequestError, match="not_unicode"):
        MARKS.joined([7, text])


def test_marks_are_bounded() -> None:
    marks = ControlMarks(range(MAX_CONTROLS))
    assert marks.split(marks.mark(MAX_CONTROLS - 1)) == [MAX_CONTROLS - 1]
    with pytest.raises(ValueError, match="more than"):
        ControlMarks(range(MAX_CONTROLS + 1))


def test_unknown_control_token_is_a_fault() -> None:
    with pytest.raises(KeyError):
        MARKS.joined([8])
