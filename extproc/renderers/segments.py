"""Segments: a prompt as an engine's own code writes it, each a text or a control token.

Such an engine tokenizes every text by itself and puts control tokens between them as ids. So a text
never becomes a control token, whatever a client wrote, and the edge of a segment is a place where a
prompt can be cut without changing its ids.

Segments are joined to one text, in which a mark stands for each control token, and another one for
the edge between two texts. So whatever is known of texts (which of them begins as an earlier one
did, and up to where) is known of segments too. A mark is two lone surrogates, which no valid text
contains. The first is the same in all marks: one character is found faster than one of many.

Source: oss-harmony 0.0.11 (Rust: encode_ordinary for texts, ids for formatting tokens) and
mistral-common 1.13 (tokens/tokenizers/instruct.py); neither lets a text become a control token.
"""

from collections.abc import Iterable

from extproc.base.errors import RequestError

# A text, or the id of a control token.
Segment = str | int

# With this, each mark begins.
_LEAD = "\ud800"
_FIRST, _LAST = 0xD801, 0xDFFE

# Stands between two texts that are tokenized apart without a control token between them.
EDGE = f"{_LEAD}\udfff"

# Most control tokens of a model.
MAX_CONTROLS = _LAST - _FIRST + 1

# A pattern for a mark or an edge, in a joined text.
MARK = f"{_LEAD}[\ud801-\udfff]"


class ControlMarks:
    """The marks of a model's control tokens.

    controls: the ids of all of them.

    Raises:
        ValueError: there are more than MAX_CONTROLS.
    """

    def __init__(self, controls: Iterable[int]) -> None:
        ids = sorted(set(controls))
        if len(ids) > MAX_CONTROLS:
            raise ValueError(f"more than {MAX_CONTROLS} control tokens")
        self._mark_by_id = {one: _LEAD + chr(_FIRST + place) for place, one in enumerate(ids)}
        self._id_by_end = {mark[1]: one for one, mark in self._mark_by_id.items()}

    def joined(self, segments: Iterable[Segment]) -> str:
        """Returns segments as one text; equal texts have equal segments, except for empty ones.

        Raises:
            RequestError: a text has a lone surrogate, from a JSON escape (not_unicode).
            KeyError: an id is no control token of this model.
        """
        pieces: list[str] = []
        follows_text = False
        for segment in segments:
            if isinstance(segment, int):
                pieces.append(self._mark_by_id[segment])
                follows_text = False
            elif segment:
                if follows_text:
                    pieces.append(EDGE)
                pieces.append(segment if segment.isascii() else checked(segment))
                follows_text = True
        return "".join(pieces)

    def mark(self, control: int) -> str:
        """Returns the mark of a control token.

        Raises:
            KeyError: the id is no control token of this model.
        """
        return self._mark_by_id[control]

    def split(self, joined: str) -> list[Segment]:
        """Returns the segments of a joined text, or of a part of it that was cut at a mark."""
        first, *others = joined.split(_LEAD)
        segments: list[Segment] = [first] if first else []
        for piece in others:
            control = self._id_by_end.get(piece[0])
            if control is not None:  # an edge is no segment
                segments.append(control)
            if len(piece) > 1:
                segments.append(piece[1:])
        return segments


def checked(text: str) -> str:
    """Returns a text, if it has no lone surrogate.

    Raises:
        RequestError: it has one (not_unicode).
    """
    try:
        text.encode("utf-16-le")  # takes half as long as UTF-8
    except UnicodeEncodeError:
        raise RequestError("not_unicode") from None
    return text
