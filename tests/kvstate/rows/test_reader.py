"""Sections of the state file: what is skipped, and what is refused."""

import base64
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import DamagedError
from kvstate.rows.format import (
    RANK,
    ROWS,
    STORE,
    VERSION,
    SavedFeed,
    SavedOwner,
    SavedRank,
    SavedRows,
    SavedStore,
    SavedStoreRows,
    StateHeader,
)
from kvstate.rows.reader import SavedState, state_in
from kvstate.rows.writer import ROWS_BYTES, StateWriter, joined

NOW = 1_000.0
ABOUT = StateHeader("plain", "1.0", NOW, 7)
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


# A file with the note of another package, a rank and a store. These bytes change only with
# `VERSION` or `FORMAT`, since other releases' routers read them.
WRITTEN = base64.b64decode(
    "S1ZTVEVFUgABAAAABQEAFQAAAJBs2lvE+ZPzYWJvdXSUpXBsYWluozEuMMtAj0AAAAAAAAcECQABAAAARpJi0RMN"
    "NhBub3RlYQQBACkAAAAPc+I4EVneHnJhbmuXoXegoW0AAZUBkZIAy0AUAAAAAAAAy0AUAAAAAAAAoMKWxAADwMCQ"
    "wgQBAAkAAACG7Sg8uf9KZHJvd3Nzb21lIHJvd3MFAQAqAAAAw3hyifpuFDBzdG9yZZihc6FtkaF3kaNDUFXLQE4A"
    "AAAAAACRoXfLQI9AAAAAAACWxAADwMCQwgQBAAQAAAAC6cwBWf5kC3Jvd3Ntb3JlAwEAAAAAAH+E4MtzBRQ5ZW5k"
)


def read(*sections: tuple[str, int, bytes], header: StateHeader | None = None) -> SavedState:
    """Returns what a file with these sections says."""
    writer = StateWriter()
    pieces = [writer.begin(header or ABOUT)]
    pieces += [writer.section(*one) for one in sections]
    return state_in(b"".join((*pieces, writer.end())), "plain", NOW)


def test_rows_are_written_in_pieces_and_read_as_a_whole() -> None:
    rows = [bytes([number]) * (ROWS_BYTES // 2 + 1) for number in range(3)]
    writer = StateWriter()
    begin, written = writer.begin(ABOUT), list(writer.held(SavedRows(RANK_0, rows)))
    found = state_in(b"".join((begin, *written, writer.end())), "plain", NOW)
    assert len(written) == 4
    assert b"".join(found.ranks["w"][0].rows) == b"".join(rows)
    assert (found.rank_count, found.block_count) == (1, 3)


def test_file_is_written_as_it_was_and_read_as_it_is_written() -> None:
    ranks, stores = SavedRows(RANK_0, [b"some", b" rows"]), SavedStoreRows(POOL, [b"more"])
    writer = StateWriter()
    written = [writer.begin(ABOUT), writer.section("note", 9, b"a")]
    written += [*writer.held(ranks), *writer.held(stores), writer.end()]
    assert b"".join(written) == WRITTEN
    found = state_in(WRITTEN, "plain", NOW)
    assert found.ranks == {"w": {0: SavedRows(RANK_0, [b"some rows"])}}
    assert found.stores == {("s", "m"): stores}
    assert [one.contents for one in found.others["note"]] == [b"a"]


@given(st.lists(st.binary(max_size=5)), st.integers(1, 9))
def test_joined_pieces_are_the_same_bytes_and_no_longer_than_the_most(
    pieces: list[bytes], most: int
) -> None:
    found = list(joined(pieces, most))
    assert b"".join(found) == b"".join(pieces)
    assert found
    assert all(len(one) <= max(most, 5) for one in found)
    assert all(len(a) + len(b) > most or not b for a, b in pairwise(found))


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
    writer = StateWriter()
    begin, saved = writer.begin(ABOUT), SavedStoreRows(POOL, [b"some", b" rows"])
    found = state_in(b"".join((begin, *writer.held(saved), writer.end())), "plain", NOW)
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
