"""Segments: a prompt as an engine's own code writes it, each a text or a control token.

Such an engine tokenizes every text by itself and puts control tokens between them as ids. So a text
never becomes a control token, whatever a client wrote, and the edge of a segment is a place where a
prompt can be cut without changing its ids.

Segments are joined to one text, in which a mark stands for each control token, and another one for
the edge between two texts. So whatever is known of texts (which of them begins as an earlier one
did, and up to where) is known of segments too. The marks are lone surrogates, which no valid text
contains.

Source: oss-harmony 0.0.11 (Rust: encode_ordinary for texts, ids for formatting tokens) and
mistral-common 1.13 (tokens/tokenizers/instruct.py); neither lets a text become a control token.
"""

import re
from collections.abc import Iterable

from extproc.base.errors import RequestError

# A text, or the id of a control token.
Segment = str | int

# Stands between two texts that are tokenized apart without a control token between them.
EDGE = "\ud800"

_FIRST_MARK, _LAST_MARK = 0xD801, 0xDFFF

# Most control tokens of a model.
MAX_CONTROLS = _LAST_MARK - _FIRST_MARK + 1

# A mark or an edge, in a joined text.
MARK = "[\ud800-\udfff]"
_SPLIT = re.compile(f"({MARK})")


class Marks:
    """The marks of a model's control tokens.

    controls: the ids of all of them.

    Raises:
        ValueError: there are more than MAX_CONTROLS.
    """

    def __init__(self, controls: Iterable[int]) -> None:
        ids = sorted(set(controls))
        if len(ids) > MAX_CONTROLS:
            raise ValueError(f"more than {MAX_CONTROLS} control tokens")
        self._mark_by_id = {one: chr(_FIRST_MARK + place) for place, one in enumerate(ids)}
        self._id_by_mark = {mark: one for one, mark in self._mark_by_id.items()}

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
                if not is_unicode(segment):
                    raise RequestError("not_unicode")
                if follows_text:
                    pieces.append(EDGE)
                pieces.append(segment)
                follows_text = True
        return "".join(pieces)

    def split(self, joined: str) -> list[Segment]:
        """Returns the segments of a joined text, or of a part of it that was cut at a mark."""
        pieces = _SPLIT.split(joined)
        # texts and marks take turns; a text may be empty, and an edge is no segment
        return [
            self._id_by_mark[piece] if place % 2 else piece
            for place, piece in enumerate(pieces)
            if piece and piece != EDGE
        ]


def is_unicode(text: str) -> bool:
    """Returns whether a text has no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
