"""Reads a state file, as `kvstate.rows.writer` writes it.

Sections of other packages are kept as they are. One of an unknown version is skipped, with the rows
that follow it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from kvstate.errors import DamagedError
from kvstate.rows.format import (
    ABOUT,
    RANK,
    ROWS,
    STORE,
    VERSION,
    SavedRank,
    SavedRows,
    SavedStore,
    SavedStoreRows,
    StateHeader,
)
from kvstate.rows.sections import Section, sections_in
from kvstate.undecodable import UNDECODABLE

# Caches do not live longer than this without a request; no file is used after it.
MAX_AGE_SECONDS = 24 * 3600.0


@dataclass(slots=True)
class SavedState:
    """What a state file says.

    ranks: of each worker, by rank. stores: by name and model. others: the sections of other
    packages, by name.
    """

    about: StateHeader
    ranks: dict[str, dict[int, SavedRows]] = field(default_factory=dict)
    stores: dict[tuple[str, str], SavedStoreRows] = field(default_factory=dict)
    others: dict[str, list[Section]] = field(default_factory=dict)

    @property
    def rank_count(self) -> int:
        """How many ranks it has."""
        return sum(map(len, self.ranks.values()))

    @property
    def block_count(self) -> int:
        """How many block hashes it has."""
        return sum(one.rank.owner.blocks for ranks in self.ranks.values() for one in ranks.values())


_Contents = TypeVar("_Contents", StateHeader, SavedRank, SavedStore)


def state_in(data: bytes, layout: str, now: float) -> SavedState:
    """Returns what a state file says.

    layout: of this process's core. now: seconds since the epoch.

    Raises:
        DamagedError: it is no whole state file, or of no use here; the text says why.
    """
    sections = sections_in(data)
    first = next(sections, None)
    if first is None or (first.name, first.version) != (ABOUT, VERSION):
        raise DamagedError("it does not say who wrote it")
    state = SavedState(_decoded(first, StateHeader))
    about = state.about
    if about.layout != layout:
        raise DamagedError(f"it was written by another core ({printed(about.layout)})")
    if not now - about.written_at <= MAX_AGE_SECONDS:
        raise DamagedError(f"it is {(now - about.written_at) / 3600:.0f} hours old")
    if not 0 <= about.secret < 1 << 64:
        raise DamagedError("its secret is not one")
    _fill(state, sections)
    return state


def printed(text: str) -> str:
    """Returns a short text from a file for a message."""
    return text[:40] if text.isprintable() else "unreadable"


def _fill(state: SavedState, sections: Iterator[Section]) -> None:
    rows: list[bytes] | None = None
    for one in sections:
        if one.name == ROWS:
            if rows is not None and one.version == VERSION:
                rows.append(bytes(one.contents))
            continue
        rows = None
        if one.name == RANK and one.version == VERSION:
            rows = []
            _add(state, _decoded(one, SavedRank), rows)
        elif one.name == STORE and one.version == VERSION:
            rows = []
            _add_store(state, _decoded(one, SavedStore), rows)
        elif one.name not in (RANK, STORE):
            kept = one._replace(contents=bytes(one.contents))
            state.others.setdefault(one.name, []).append(kept)


def _add(state: SavedState, rank: SavedRank, rows: list[bytes]) -> None:
    ranks = state.ranks.setdefault(rank.worker, {})
    if not rank.is_sound or rank.rank in ranks:
        raise DamagedError("one of its ranks is not possible")
    ranks[rank.rank] = SavedRows(rank, rows)


def _add_store(state: SavedState, store: SavedStore, rows: list[bytes]) -> None:
    place = store.store, store.model
    if not store.is_sound or place in state.stores:
        raise DamagedError("one of its stores is not possible")
    state.stores[place] = SavedStoreRows(store, rows)


def _decoded(section: Section, kind: type[_Contents]) -> _Contents:
    try:
        return msgspec.msgpack.decode(section.contents, type=kind)
    except UNDECODABLE:
        raise DamagedError(f"section {section.name} at byte {section.at} is not readable") from None
