import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import DamagedError
from kvstate.rows.sections import MAGIC, MAX_CONTENTS_BYTES, Section, SectionWriter, sections_in

SECTIONS = [("about", 1, b"who wrote it"), ("rank", 2, b""), ("rows", 1, bytes(range(256)) * 4)]


def written(*sections: tuple[str, int, bytes]) -> bytes:
    writer = SectionWriter()
    parts = [writer.begin(), *(writer.section(*one) for one in sections), writer.end()]
    return b"".join(parts)


WHOLE = written(*SECTIONS)

sections = st.tuples(st.text("abcde", max_size=9), st.integers(0, 9), st.binary(max_size=50))


def read(data: bytes) -> list[tuple[str, int, bytes]]:
    return [(one.name, one.version, bytes(one.contents)) for one in sections_in(data)]


@given(st.lists(sections))
def test_sections_are_read_as_they_were_written(given: list[tuple[str, int, bytes]]) -> None:
    given = [one for one in given if one[0] != "end"]
    assert read(written(*given)) == given


def test_section_names_its_beginning() -> None:
    first, second, _ = sections_in(WHOLE)
    assert first == Section("about", 1, b"who wrote it", len(MAGIC))
    assert WHOLE[second.at :].startswith(b"\x04")


@given(data=st.data())
def test_changed_byte_is_refused(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(WHOLE) - 1))
    damaged = bytearray(WHOLE)
    damaged[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedError):
        read(bytes(damaged))


@given(st.integers(0, len(WHOLE) - 1))
def test_truncated_file_is_refused(length: int) -> None:
    with pytest.raises(DamagedError):
        read(WHOLE[:length])


@given(st.permutations(range(len(SECTIONS) + 1)), st.binary(max_size=3))
def test_sections_keep_their_places(order: list[int], rest: bytes) -> None:
    starts = [one.at for one in sections_in(WHOLE)]
    last = len(WHOLE) - len(SectionWriter().end())
    bounds = [*zip(starts, [*starts[1:], last], strict=True), (last, len(WHOLE))]
    moved = MAGIC + b"".join(WHOLE[slice(*bounds[at])] for at in order) + rest
    if moved == WHOLE:
        return
    with pytest.raises(DamagedError):
        read(moved)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a state file"),
        (b"PK\3\4" * 9, "not a state file"),
        (MAGIC[:8] + struct.pack("<I", 2), "not of format 1"),
        (MAGIC, "cut off at byte 12"),
        (WHOLE[:-1], "cut off"),
        (WHOLE + b"\0", "follows its end"),
    ],
)
def test_refusals_say_why(data: bytes, why: str) -> None:
    with pytest.raises(DamagedError, match=why):
        read(data)


def test_contents_that_are_too_long_are_not_written() -> None:
    with pytest.raises(ValueError, match="section rows is too long"):
        SectionWriter().section("rows", 1, bytes(MAX_CONTENTS_BYTES + 1))
