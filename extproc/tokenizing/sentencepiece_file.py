"""Reads a SentencePiece model: the pieces of its vocabulary, and how it changes texts.

Source: sentencepiece 0.2.3 (sentencepiece_model.proto): ModelProto has pieces (1), trainer_spec (2)
and normalizer_spec (3). Protocol buffers' wire format is read field by field, since a bomb of
nested or repeated fields would be built before it could be refused.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

import msgspec

from extproc.tokenizing.byte_pairs import MAX_TOKENS

# Most bytes of a piece.
MAX_PIECE_BYTES = 1_024

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class Kind(IntEnum):
    """The kinds of pieces."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A piece; its id is its place. score: the higher, the earlier it is joined."""

    text: str
    score: float
    kind: Kind


class Pieces(msgspec.Struct, frozen=True):
    """A vocabulary that joins pairs (BPE), with a piece for each byte.

    is_plain: texts are changed in no other way than that spaces become marks, of which one is put
    before a text.
    """

    pieces: list[Piece]
    is_plain: bool

    @property
    def controls(self) -> dict[str, int]:
        """The ids of the pieces that no text becomes."""
        return {
            piece.text: place
            for place, piece in enumerate(self.pieces)
            if piece.kind in (Kind.CONTROL, Kind.UNKNOWN)
        }


def read_pieces(content: bytes) -> Pieces:
    """Returns the vocabulary of a model.

    Raises:
        ValueError: it is no such model, of another kind, or too large.
    """
    pieces: list[Piece] = []
    trainer: dict[int, int] = {}
    normalizer: dict[int, int | float | bytes] = {}
    for field, value in _fields(content):
        if field == 1 and isinstance(value, bytes):
            pieces.append(_piece(value))
            if len(pieces) > MAX_TOKENS:
                raise ValueError(f"more than {MAX_TOKENS} pieces")
        elif field == 2 and isinstance(value, bytes):
            trainer = {key: one for key, one in _fields(value) if isinstance(one, int)}
        elif field == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    if trainer.get(3) != 2 or not trainer.get(35) or trainer.get(24):
        raise ValueError("it is no SentencePiece model that joins pairs and has all bytes")
    if {piece.text for piece in pieces if piece.kind is Kind.BYTE} != BYTES:
        raise ValueError("it has no piece for each byte")
    if len({piece.text for piece in pieces}) != len(pieces):
        raise ValueError("two pieces have the same text")
    # precompiled_charsmap, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces
    defaults: dict[int, int | float | bytes] = {2: b"", 3: 1, 4: 1, 5: 1}
    rules = {key: normalizer.get(key, default) for key, default in defaults.items()}
    return Pieces(pieces, rules == {2: b"", 3: 1, 4: 0, 5: 1})


BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


def _piece(content: bytes) -> Piece:
    text, score, kind = b"", 0.0, 1
    for field, value in _fields(content):
        match field, value:
            case 1, bytes():
                text = value
            case 2, float():
                score = value
            case 3, int():
                kind = value
    if not 0 < len(text) <= MAX_PIECE_BYTES:
        raise ValueError(f"a piece is empty, or has more than {MAX_PIECE_BYTES} bytes")
    return Piece(text.decode(), score, Kind(kind))


def _fields(content: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yields the fields of a message: their numbers and values.

    Raises:
        ValueError: it is cut off, or no message.
    """
    place = 0
    while place < len(content):
        tag, place = _varint(content, place)
        field, kind = tag >> 3, tag & 7
        value: int | float | bytes
        if kind == _VARINT:
            value, place = _varint(content, place)
        elif kind == _LENGTH:
            length, place = _varint(content, place)
            value = content[place : place + length]
            place += length
        elif kind == _FIXED32:
            value = struct.unpack("<f", content[place : place + 4].ljust(4, b"\0"))[0]
            place += 4
        elif kind == _FIXED64:
            value = content[place : place + 8]
            place += 8
        else:
            raise ValueError("no SentencePiece model")
        if place > len(content):
            raise ValueError("a SentencePiece model that is cut off")
        yield field, value


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """Returns a number, and the place after it."""
    number = shift = 0
    while place < len(content) and shift < 64:
        byte = content[place]
        number |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return number, place
        shift += 7
    raise ValueError("no SentencePiece model")
