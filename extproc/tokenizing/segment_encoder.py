"""Tokenizes joined segments (`extproc.renderers.segments`): each text by itself, marks as ids."""

import re
from array import array
from collections.abc import Sequence
from itertools import takewhile

from extproc.base.errors import RequestError
from extproc.renderers.segments import MARK, ControlMarks
from extproc.tokenizing.text_encoder import Encoder, TextEncoder
from extproc.tokenizing.tokenizer_layout import Cutter
from kvstate.overlap import Tokens


class SegmentEncoder:
    """An encoder of joined segments (`extproc.tokenizing.text_encoder.Encoder`).

    texts: encodes single texts, in which it finds no special tokens.
    """

    def __init__(self, texts: Encoder, marks: ControlMarks) -> None:
        self._texts = texts
        self._marks = marks
        self.name = texts.name
        self.inline_characters = texts.inline_characters
        self.max_characters = texts.max_characters
        self.forgotten_characters = texts.forgotten_characters

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the ids of each joined text, as `Encoder.ids`."""
        split = [self._marks.split(text) for text in texts]
        contents = [one for segments in split for one in segments if isinstance(one, str)]
        encoded = iter(self._texts.ids(contents))
        found = []
        for segments in split:
            ids = array("I")
            for segment in segments:
                if isinstance(segment, int):
                    ids.append(segment)
                else:
                    ids.extend(next(encoded))
            found.append(ids)
        return found


class OrdinaryEncoder:
    """An encoder of texts in which no added token is found, by a tokenizer that has some.

    Such a tokenizer differs only for a text in which one occurs: that is refused, as a second
    tokenizer without added tokens would take as much memory as the first (500 MB for gpt-oss).

    encoder: of the tokenizer. added: the contents of its added tokens.
    """

    def __init__(self, encoder: Encoder, added: Sequence[str]) -> None:
        self._encoder = encoder
        self._prefix = _beginning(added)
        self._added = re.compile("|".join(map(re.escape, added)))
        self.name = encoder.name
        self.inline_characters = encoder.inline_characters
        self.max_characters = encoder.max_characters
        self.forgotten_characters = encoder.forgotten_characters

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the ids of each text, as `Encoder.ids`.

        Raises:
            RequestError: an added token occurs in a text (unsupported_control_text).
        """
        for text in texts:
            if self._prefix in text and self._added.search(text):
                raise RequestError("unsupported_control_text")
        return self._encoder.ids(texts)


def _beginning(texts: Sequence[str]) -> str:
    """Returns the characters with which all texts begin."""
    first, last = min(texts), max(texts)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(one for one, _ in same)


class MarkCutter(Cutter):
    """Cuts joined segments at marks, which is exact: texts are tokenized one by one."""

    def __init__(self) -> None:
        super().__init__([])
        self._patterns = [re.compile(MARK)]


def segment_texts(texts: Encoder, marks: ControlMarks, max_known_bytes: int) -> TextEncoder:
    """Returns what tokenizes joined segments, and only their new part.

    texts, marks: as in `SegmentEncoder`. max_known_bytes: as in `TextEncoder`.
    """
    return TextEncoder(SegmentEncoder(texts, marks), MarkCutter(), max_known_bytes)
