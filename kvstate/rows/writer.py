"""Writes a state file.

Sections: "about" first, then those of other packages, then "rank" for each rank, directly followed
by its "rows", then "store" for each store and model, with its "rows".
"""

from collections.abc import Iterable, Iterator

import msgspec

from kvstate.rows.format import (
    ABOUT,
    RANK,
    ROWS,
    STORE,
    VERSION,
    SavedRows,
    SavedStoreRows,
    StateHeader,
)
from kvstate.rows.sections import SectionWriter

# Rows that are written together.
ROWS_BYTES = 1024 * 1024


class StateWriter:
    """Makes the bytes of a state file, in order."""

    def __init__(self) -> None:
        self._sections = SectionWriter()

    def begin(self, about: StateHeader) -> bytes:
        """Returns the first bytes, which say who writes the file."""
        first = self._sections.begin()
        return first + self._sections.section(ABOUT, VERSION, msgspec.msgpack.encode(about))

    def section(self, name: str, version: int, contents: bytes) -> bytes:
        """Returns a section of another package."""
        return self._sections.section(name, version, contents)

    def held(self, saved: SavedRows | SavedStoreRows) -> Iterator[bytes]:
        """Yields the sections of a rank or store."""
        name, contents = (
            (RANK, msgspec.msgpack.encode(saved.rank))
            if isinstance(saved, SavedRows)
            else (STORE, msgspec.msgpack.encode(saved.store))
        )
        yield self._sections.section(name, VERSION, contents)
        for rows in joined(saved.rows, ROWS_BYTES):
            yield self._sections.section(ROWS, VERSION, rows)

    def end(self) -> bytes:
        """Returns the last bytes."""
        return self._sections.end()


def joined(pieces: Iterable[bytes], most: int) -> Iterator[bytes]:
    """Joins pieces of rows to pieces of at most so many bytes, or of one that is longer.

    It yields at least one, which is empty if there are no rows.
    """
    some: list[bytes] = []
    length = 0
    for piece in pieces:
        if some and length + len(piece) > most:
            yield b"".join(some)
            some, length = [], 0
        some.append(piece)
        length += len(piece)
    yield b"".join(some)
