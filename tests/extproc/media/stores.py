"""Prompts with media, and the blocks that an engine stores for them."""

from array import array
from collections.abc import Sequence
from itertools import count

from extproc.media.prompts import MediaPrompt
from extproc.requests.media import Item
from kvstate.events import BlockHash, BlocksStored
from kvstate.media import FIRST_PAD, TURNS
from kvstate.overlap import FIRST_WIDE_TOKEN, Extra, Tokens

SIZE = 4
START, PAD, END = 90, 91, 92
WRITTEN = array("I", [START, PAD, END])


class Shot:
    """An image: its name, and how many ids stand for it.

    is_exact: whether it stays what it is. pad: its own id, 0 if the engine repeats one for all.
    is_long: whether it has four of them, of which each stands for a longer one.
    """

    def __init__(
        self,
        name: str,
        length: int = 6,
        *,
        is_exact: bool = True,
        pad: int = 0,
        is_long: bool = False,
    ) -> None:
        self.name = name
        self.length = length
        self.is_exact = is_exact
        self.pad = pad
        self.is_long = is_long

    @property
    def ids(self) -> list[int]:
        pads = [FIRST_PAD + self.pad if self.pad else PAD]
        if self.is_long:
            pads = [FIRST_WIDE_TOKEN + self.pad * TURNS + turn for turn in range(TURNS)]
        return [START, *(pads * self.length)[: self.length], END]


Piece = Sequence[int] | Shot


def prompt(
    *pieces: Piece, salt: str | None = None, lora: str | None = None, has_own_ids: bool = False
) -> MediaPrompt:
    """Returns the prompt of texts and images, which take turns."""
    texts = [array("I", one) for one in pieces if not isinstance(one, Shot)]
    shots = [one for one in pieces if isinstance(one, Shot)]
    items = tuple([Item("image", one.name.encode(), one.is_exact) for one in shots])
    keys = tuple([one.digest for one in items])
    written = (WRITTEN,) * len(shots)
    return MediaPrompt("tiny", lora, salt, tuple(texts), written, items, keys, has_own_ids)


def expanded(*pieces: Piece) -> tuple[Tokens, list[tuple[int, int, str]]]:
    """Returns the ids that an engine computes, and where its images begin, end and are named."""
    ids: list[int] = []
    places = []
    for piece in pieces:
        if isinstance(piece, Shot):
            if not piece.pad:
                places.append((len(ids) + 1, len(ids) + 1 + piece.length, piece.name.upper()))
            ids += piece.ids
        else:
            ids += piece
    return array("I", ids), places


class Store:
    """A worker's store: announces the whole blocks of prompts, each once."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._hashes: dict[tuple[object, ...], int] = {}

    def store(
        self, *pieces: Piece, salt: str | None = None, until: int | None = None
    ) -> BlocksStored | None:
        """Returns the event of the blocks that are new, up to a token; None if there are none."""
        tokens, places = expanded(*pieces)
        end = min(len(tokens), until or len(tokens)) // SIZE
        chain: tuple[object, ...] = (salt,)
        parent: int | None = None
        new: list[BlockHash] = []
        extras: list[Extra] = []
        first = 0
        for block in range(end):
            begin = block * SIZE
            named: list[object] = [
                [name, at - begin]
                for at, stop, name in places
                if at < begin + SIZE and stop > begin
            ]
            if salt is not None and not block:
                named.append(salt)
            chain = (chain, tuple(tokens[begin : begin + SIZE]), repr(named))
            if chain in self._hashes and not new:
                parent, first = self._hashes[chain], block + 1
                continue
            self._hashes[chain] = next(self._numbers)
            new.append(self._hashes[chain])
            extras.append(tuple(named))
        ids = tokens[first * SIZE : end * SIZE]
        return BlocksStored(new, parent, ids, SIZE, extras=extras) if new else None
