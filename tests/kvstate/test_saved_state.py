"""Sections of the state file: what is skipped, and what is refused."""

import msgspec
import pytest

from kvstate.errors import DamagedError
from kvstate.saved import SavedFeed, SavedOwner, SavedRank, SavedRows, SavedStore, SavedStoreRows
from kvstate.saved_state import (
    RANK,
    ROWS,
    ROWS_BYTES,
    STORE,
    VERSION,
    SavedState,
    StateHeader,
    section_of,
    sections_of,
    state_in,
)
from kvstate.sections import Writer

NOW = 1_000.0
RANK_0 = SavedRank(
    "w",
    "",
    "m",
    0,
    1,
    SavedFeed(1, ((0, 5.0),), 5.0, "", False),
    SavedOwner(b"", 3, None, None, (), False),
)
POOL = SavedStore("s", "m", ("w",), ("CPU",), 60.0, ("w",), NOW, RANK_0.owner)
ENCODED = msgspec.msgpack.encode(RANK_0)
ENCODED_POOL = msgspec.msgpack.encode(POOL)
OF_NOBODY = msgspec.msgpack.encode(msgspec.structs.replace(POOL, publishers=()))


def read(*sections: tuple[str, int, bytes], header: StateHeader | None = None) -> SavedState:
    """Returns what a file with these sections says."""
    writer = Writer()
    about = header or StateHeader("plain", "1.0", NOW, 7)
    pieces = [writer.begin(), section_of(writer, about)]
    pieces += [writer.section(*one) for one in sections]
    return state_in(b"".join((*pieces, writer.end())), "plain", NOW)


def test_rows_are_written_in_pieces_and_read_as_a_whole() -> None:
    rows = [bytes([number]) * (ROWS_BYTES // 2 + 1) for number in range(3)]
    writer = Writer()
    saved = SavedRows(RANK_0, rows)
    about = section_of(writer, StateHeader("plain", "1.0", NOW, 7))
    begin, written = Writer().begin(), list(sections_of(writer, saved))
    found = state_in(b"".join((begin, about, *written, writer.end())), "plain", NOW)
    assert len(written) == 4
    assert b"".join(found.ranks["w"][0].rows) == b"".join(rows)
    assert (found.rank_count, found.block_count) == (1, 3)


def test_sections_of_unknown_versions_are_skipped_with_their_rows() -> None:
    later, unknown = VERSION + 1, ("note", 9, b"a")
    state = read((RANK, later, b""), (ROWS, VERSION, b"lost"), unknown, (ROWS, VERSION, b"lost"))
    assert (state.ranks, [one.contents for one in state.others["note"]]) == ({}, [b"a"])
    state = read((RANK, VERSION, ENCODED), (ROWS, later, b"lost"), (ROWS, VERSION, b"kept"))
    assert state.ranks["w"][0].rows == [b"kept"]


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (StateHeader("\n", "1.0", NOW, 7), "unreadable"),
        (StateHeader("plain", "1.0", NOW - 10**6, 7), "hours old"),
        (StateHeader("plain", "1.0", NOW, -1), "secret"),
    ],
)
def test_file_of_another_core_time_or_secret_is_refused(header: StateHeader, text: str) -> None:
    with pytest.raises(DamagedError, match=text):
        read(header=header)


def test_store_is_read_with_its_rows() -> None:
    writer = Writer()
    about = section_of(writer, StateHeader("plain", "1.0", NOW, 7))
    written = b"".join(sections_of(writer, SavedStoreRows(POOL, [b"some", b" rows"])))
    found = state_in(b"".join((Writer().begin(), about, written, writer.end())), "plain", NOW)
    assert found.stores == {("s", "m"): SavedStoreRows(POOL, [b"some rows"])}
    assert not found.ranks
    skipped = read((STORE, VERSION + 1, b""), (ROWS, VERSION, b"lost"))
    assert (skipped.stores, skipped.others) == ({}, {})


@pytest.mark.parametrize(
    "sections",
    [
        [(RANK, VERSION, b"\xc1")],
        [(RANK, VERSION, ENCODED)] * 2,
        [(STORE, VERSION, b"\xc1")],
        [(STORE, VERSION, ENCODED_POOL)] * 2,
        [(STORE, VERSION, OF_NOBODY)],
    ],
)
def test_rank_or_store_that_is_unreadable_or_there_twice_is_refused(
    sections: list[tuple[str, int, bytes]],
) -> None:
    with pytest.raises(DamagedError):
        read(*sections)
