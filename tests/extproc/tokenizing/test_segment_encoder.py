from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.renderers.segments import ControlMarks, Segment
from extproc.tokenizing.segment_encoder import (
    MarkCutter,
    OrdinaryEncoder,
    SegmentEncoder,
    segment_texts,
)
from extproc.tokenizing.text_encoder import TextEncoder
from kvstate.overlap import Tokens

START, END = 1 << 20, (1 << 20) + 1
MARKS = ControlMarks([START, END])


class Pairs:
    """Makes one id of two characters, so that a cut at a wrong place changes the ids."""

    name = "pairs"
    inline_characters = 1_000
    max_characters = 1 << 20
    forgotten_characters = 0

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        return [
            array("I", [hash(text[at : at + 2]) & 0xFFFF for at in range(0, len(text), 2)])
            for text in texts
        ]


def whole(segments: Sequence[Segment]) -> list[int]:
    """The ids as an engine computes them: one segment after the other."""
    found: list[int] = []
    for segment in segments:
        found += [segment] if isinstance(segment, int) else Pairs().ids([segment])[0]
    return found


def encode(texts: TextEncoder, segments: Sequence[Segment]) -> list[int]:
    return texts.finish(texts.begin(MARKS.joined(segments))).ids.tolist()


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)
# some are long, since known texts are cut at distances of thousands of characters
LONG = st.builds(lambda text, times: text * times, TEXT, st.sampled_from([1, 1, 300, 1_000]))
SEGMENTS = st.lists(LONG | st.sampled_from([START, END]), max_size=12)


@given(SEGMENTS, st.lists(SEGMENTS, max_size=3))
def test_every_turn_has_the_ids_of_its_segments(
    first: list[Segment], more: list[list[Segment]]
) -> None:
    texts = segment_texts(Pairs(), MARKS, 1 << 24)
    turns = [first]
    for segments in more:
        turns.append([*turns[-1], *segments])
    for turn in [*turns, *reversed(turns)]:
        assert encode(texts, turn) == whole(turn)


def test_next_turn_costs_its_new_segments_only() -> None:
    texts = segment_texts(Pairs(), MARKS, 1 << 24)
    first: list[Segment] = [START, "user", "a" * 40_000, END, START, "model"]
    encode(texts, first)
    work = texts.begin(MARKS.joined([*first, "yes", END]))
    assert work.new_characters == len(MARKS.joined([START, "model", "yes", END]))
    assert encode(texts, [*first, "yes", END]) == whole([*first, "yes", END])


def test_texts_with_an_edge_are_tokenized_apart() -> None:
    encoder = SegmentEncoder(Pairs(), MARKS)
    apart, together = MARKS.joined(["abc", "d"]), MARKS.joined(["abcd"])
    assert encoder.ids([apart, together]) == [
        array("I", whole(["abc", "d"])),
        array("I", whole(["abcd"])),
    ]


def test_text_with_an_added_token_is_refused_and_others_have_the_ids_of_the_tokenizer() -> None:
    ordinary = OrdinaryEncoder(Pairs(), ["<|a|>", "<|b.|>"])
    texts = ["plain", "<|c|>", "<|b-|>"]
    assert ordinary.ids(texts) == Pairs().ids(texts)
    for text in ("x<|a|>", "<|b.|>"):
        with pytest.raises(RequestError, match="unsupported_control_text"):
            ordinary.ids(["plain", text])


@pytest.mark.parametrize("text", ["", "plain"])
def test_text_without_a_mark_is_not_cut(text: str) -> None:
    assert MarkCutter().find(text, 0) == []
