"""From prompt text to ids, tokenizing only what is new in it."""

import threading
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from extproc.errors import RequestError
from extproc.tokenizing.cuts import Cutter
from extproc.tokenizing.known_texts import Cut, Known, KnownTexts
from kvstate.events import Tokens


class Encoder(Protocol):
    """Tokenizes texts from nothing; safe to use from several threads.

    name: of the library, with its version.
    inline_characters: so much text takes under a millisecond.
    max_characters: so much of the worst text takes a thread a second or two.
    forgotten_characters: to tokenize so much anew is cheaper than to remember it.
    """

    name: str
    inline_characters: int
    max_characters: int
    forgotten_characters: int

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text, without what add_special_tokens adds.

        Raises:
            RequestError: there is a lone surrogate, from a JSON escape (not_unicode); the library
                fails (tokenizer_failed).
        """


class Encoded(NamedTuple):
    """The ids of a text; not to be changed.

    lasting: so many of the first stay the same however the text goes on.
    """

    ids: Tokens
    lasting: int


class Work(NamedTuple):
    """A text that was looked up, to be finished."""

    text: str
    known: Known

    @property
    def new_characters(self) -> int:
        """How much of the text has to be tokenized."""
        return 0 if self.known.is_whole else len(self.text) - self.known.new_from


# The last parts of texts, mostly what a chat template puts before the answer: few, and short.
MAX_ENDING_CHARACTERS = 128
MAX_ENDINGS = 64


class TextEncoder:
    """Encodes texts with one encoder, and remembers them. Safe to use from several threads.

    cutter: None where texts cannot be cut; then only a repeated text is known.
    max_known_bytes: what may be remembered.
    """

    def __init__(self, encoder: Encoder, cutter: Cutter | None, max_known_bytes: int) -> None:
        self._encoder = encoder
        self._cutter = cutter
        self._known = KnownTexts(max_known_bytes)
        self._endings: dict[str, Tokens] = {}
        self._lock = threading.Lock()

    def is_cheap(self, new_characters: int) -> bool:
        """Whether so much new text is tokenized within a millisecond."""
        return new_characters <= self._encoder.inline_characters

    def begin(self, text: str) -> Work:
        """Looks a text up: about a third of a microsecond a kilobyte."""
        with self._lock:
            return Work(text, self._known.find(text))

    def finish(self, work: Work) -> Encoded:
        """Tokenizes what is new, and remembers the whole.

        Raises:
            RequestError: there is more new text than is tokenized at once
                (too_many_new_characters), or it cannot be tokenized.
        """
        text, known = work
        if known.is_whole:
            return _encoded(known.ids, known.cuts)
        if work.new_characters > self._encoder.max_characters:
            raise RequestError("too_many_new_characters")
        spans = self._cutter.find(text, known.new_from) if self._cutter else []
        edges = (known.new_from, *(start for start, _ in spans), len(text))
        parts = self._ids([text[start:end] for start, end in pairwise(edges)])
        cuts = list(known.cuts)
        ids = known.ids[: cuts[-1].tokens] if cuts else array("I")
        ids.extend(parts[0])
        for (start, end), part in zip(spans, parts[1:], strict=True):
            cuts.append(Cut(start, end, len(ids)))
            ids.extend(part)
        if not known.cuts or work.new_characters > self._encoder.forgotten_characters:
            with self._lock:
                self._known.remember(text, known, ids, cuts)
        return _encoded(ids, cuts)

    def _ids(self, parts: Sequence[str]) -> list[Tokens]:
        """The ids of each part; not to be changed, since of the last one they may be known."""
        ending = parts[-1]
        known = self._endings.get(ending)
        if known is not None:
            return [*self._encoder.ids(parts[:-1]), known] if len(parts) > 1 else [known]
        ids = self._encoder.ids(parts)
        if len(parts) > 1 and len(ending) <= MAX_ENDING_CHARACTERS:
            if len(self._endings) >= MAX_ENDINGS:
                self._endings.clear()
            self._endings[ending] = ids[-1]
        return ids


def _encoded(ids: Tokens, cuts: Sequence[Cut]) -> Encoded:
    return Encoded(ids, cuts[-1].tokens if cuts else 0)
