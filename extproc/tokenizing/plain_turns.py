"""Turns plain conversations into ids by the bytes of their bodies, and reads only the new turns.

Where it is known what a template writes around contents (`extproc.templates.skeletons`), and an
added token before each turn at which a text can be cut (`tokenizer_layout`), a prompt's ids are
those of its turns, one after the other. So every turn is tokenized once, whatever conversations it
is in. Contents are found as they are written in the body, by a table in the core
(extproc/native/turn_table.c): a known content is neither decoded nor made into a text again. A turn
is known by its content and its shape, which is the number of what a template writes around it for a
role. Memory is bounded in bytes: two generations of turns are kept; when the younger one is full,
the older one is dropped.
"""

import os
from array import array
from itertools import count
from struct import Struct
from typing import NamedTuple

import msgspec

from extproc._core import TurnTable, turn_texts
from extproc.base.errors import RequestError
from extproc.requests.chat_request import BILLING_LINE
from extproc.requests.plain_chat import PlainChat, roles_in
from extproc.requests.prompt import CONVERSATION
from extproc.templates.skeletons import MOST_SEQUENCES, Skeletons, Turns
from extproc.tokenizing.text_encoder import Encoder, TextEncoder
from extproc.tokenizing.tokenizer_layout import Cutter
from kvstate.overlap import Tokens
from kvstate.undecodable import UNDECODABLE

# Memory of all turns of a model.
MAX_TURN_BYTES = 64 * 1024 * 1024

# Of the secret by which the table's places cannot be guessed.
_SECRET_BYTES = 24

# What templates write around contents is numbered up to here: it is a few for each template.
_MOST_SHAPES = 4_096

_SYSTEM = ord("s")

_text = msgspec.json.Decoder(str)
_span = Struct("@QQ")  # where a content begins and ends in a body


class _TurnShapes(NamedTuple):
    """What a template writes for messages with certain roles.

    turns: around each content. shapes: the numbers of these, as bytes. last: the ids of what is
    behind the last turn.
    """

    turns: Turns
    shapes: bytes
    last: Tokens


class TurnParts(NamedTuple):
    """The turns of a conversation that was looked up.

    parts: the ids of each turn, or its content as it is written, for a new one. new: the indices
    of those. texts: of the new turns. new_characters: how many must be tokenized.
    """

    shaped: _TurnShapes
    parts: list[Tokens | bytes]
    new: list[int]
    texts: list[str]
    new_characters: int


class PlainTurns:
    """The turns of a model's plain conversations. Safe to use from several threads.

    skeletons: of its template. cutter: finds where texts can be cut. forms: of its conversations.
    """

    def __init__(
        self,
        encoder: Encoder,
        cutter: Cutter,
        skeletons: Skeletons,
        forms: int = CONVERSATION,
        max_bytes: int = MAX_TURN_BYTES,
    ) -> None:
        self.forms = forms
        self._encoder, self._cutter, self._skeletons = encoder, cutter, skeletons
        self._shaped: dict[bytes, _TurnShapes | None] = {}
        self._numbers: dict[tuple[int, str, str, bool], int] = {}
        self._next = count()
        self._table = TurnTable(max_bytes, os.urandom(_SECRET_BYTES))

    def find(self, body: bytes, chat: PlainChat) -> TurnParts | None:
        """Returns what is known of a conversation's turns.

        Returns None if it is not known what is around them, or if it is not plain after all.

        body: as the chat was read from it.
        """
        _, _, roles, spans = chat
        shaped = self._shaped.get(roles) or self._shape(roles)
        if shaped is None or self._skeletons.is_refuted:
            return None
        parts, new = self._table.find(body, spans, shaped.shapes)
        if not new:
            return TurnParts(shaped, parts, new, [], 0)
        texts = _texts(body, chat, shaped.turns, new)
        if texts is None:
            return None
        return TurnParts(shaped, parts, new, texts, sum(map(len, texts)))

    def is_cheap(self, found: TurnParts) -> bool:
        """Returns whether the new turns are tokenized without a thread."""
        return found.new_characters <= self._encoder.inline_characters

    def finish(self, found: TurnParts) -> Tokens:
        """Tokenizes the new turns, remembers them, and returns the ids of all.

        Raises:
            RequestError: there is too much new text (too_many_new_characters), or it cannot be
                tokenized.
        """
        shaped, parts, new, texts, new_characters = found
        if new:
            if new_characters > self._encoder.max_characters:
                raise RequestError("too_many_new_characters")
            self._table.keep(parts, new, shaped.shapes, self._encoder.ids(texts))
        parts.append(shaped.last)
        return array("I", b"".join(parts))

    def _shape(self, roles: bytes) -> _TurnShapes | None:
        """Returns what is around the turns of conversations with these roles, None if unknown."""
        if roles in self._shaped:
            return None
        skeleton = self._skeletons.known(roles_in(roles))
        if skeleton is None:
            return None
        turns = skeleton.cut(self._cutter.first)
        shaped = None if turns is None else self._numbered(roles, turns)
        if len(self._shaped) >= MOST_SEQUENCES:
            self._shaped.clear()
        self._shaped[roles] = shaped
        return shaped

    def _numbered(self, roles: bytes, turns: Turns) -> _TurnShapes | None:
        """Returns the turns with their numbers; None if there are too many."""
        if len(self._numbers) + len(roles) > _MOST_SHAPES:
            return None
        numbers = array("I")
        for around in zip(roles, turns.before, turns.behind, strict=True):
            # not the number of those before: two threads could count the same
            numbers.append(self._numbers.setdefault((*around, turns.strips), next(self._next)))
        (last,) = self._encoder.ids([turns.last])
        return _TurnShapes(turns, numbers.tobytes(), last)


def _texts(body: bytes, chat: PlainChat, turns: Turns, new: list[int]) -> list[str] | None:
    """Returns the texts of the new turns; None if a decoder refuses one, or a rule of its own
    applies to it.
    """
    _, _, roles, spans = chat
    known: list[str | None] = [None] * len(new)
    if not turns.strips:
        known = turn_texts(body, spans, new, turns.before, turns.behind)
    texts = []
    for at, one in zip(new, known, strict=True):
        text = _decoded(body, spans, turns, at) if one is None else one
        if text is None:
            return None
        if roles[at] == _SYSTEM and text.startswith(BILLING_LINE, len(turns.before[at])):
            return None
        texts.append(text)
    return texts


def _decoded(body: bytes, spans: bytes, turns: Turns, at: int) -> str | None:
    """Returns the text of a turn whose content takes a decoder; None if that refuses it."""
    start, end = _span.unpack_from(spans, at * _span.size)
    try:
        content = _text.decode(body[start - 1 : end + 1])
    except UNDECODABLE:
        return None
    if turns.strips:
        content = content.strip()
    return f"{turns.before[at]}{content}{turns.behind[at]}"


def plain_turns(
    texts: TextEncoder, skeletons: Skeletons | None, text_forms: int
) -> PlainTurns | None:
    """Returns the turns of a model's plain conversations; None if it takes a template or the whole
    text to know them.

    texts: encodes the model's texts. text_forms: of all its texts.
    """
    if texts.cutter is None or skeletons is None:
        return None
    return PlainTurns(texts.encoder, texts.cutter, skeletons, text_forms | CONVERSATION)
