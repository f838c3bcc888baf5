"""The format of the state file: named sections, each with a version, a length and a checksum.

All numbers are little-endian. The file begins with `MAGIC`; then come sections, the last one of
which is "end":

    u8    length of the name
    u16   version of the section's contents
    u32   length of the contents
    u64   checksum: XXH3 of all checksums before, of this header's other fields, and of the contents
          (so sections cannot be left out, repeated or moved)
    the name, in ASCII
    the contents

A reader skips sections whose name or version it does not know. `FORMAT`, which the magic contains,
changes only if all this does.
"""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

import xxhash

from kvstate.errors import DamagedError

FORMAT = 1
MAGIC = b"KVSTEER\0" + FORMAT.to_bytes(4, "little")

END = "end"

# The longest contents of one section: what is longer goes into several.
MAX_CONTENTS_BYTES = 16 * 1024 * 1024

_HEADER = Struct("<BHIQ")


class Section(NamedTuple):
    """One section. at: where it begins in the file."""

    name: str
    version: int
    contents: bytes | memoryview
    at: int = 0


class SectionWriter:
    """Makes the bytes of a file, section by section."""

    def __init__(self) -> None:
        self._sum = 0

    def begin(self) -> bytes:
        """Returns the first bytes of the file."""
        return MAGIC

    def section(self, name: str, version: int, contents: bytes) -> bytes:
        """Returns the bytes of the next section.

        Raises:
            ValueError: the contents are too long.
        """
        if len(contents) > MAX_CONTENTS_BYTES:
            raise ValueError(f"section {name} is too long")
        self._sum = _sum(self._sum, name.encode(), version, contents)
        head = _HEADER.pack(len(name), version, len(contents), self._sum)
        return head + name.encode() + contents

    def end(self) -> bytes:
        """Returns the last bytes of the file."""
        return self.section(END, 1, b"")


def _sum(before: int, name: bytes, version: int, contents: bytes | memoryview) -> int:
    head = before.to_bytes(8, "little") + version.to_bytes(2, "little") + name
    seed = int(xxhash.xxh3_64_intdigest(head))
    return int(xxhash.xxh3_64_intdigest(contents, seed=seed))


def sections_in(data: bytes) -> Iterator[Section]:
    """Yields the sections of a file, without the end; all are whole only once it ends.

    Raises:
        DamagedError: the data is not a file of this format, or not a whole one.
    """
    if not data.startswith(MAGIC[:8]):
        raise DamagedError("it is not a state file")
    if data[8:12] != MAGIC[8:]:
        raise DamagedError(f"it is not of format {FORMAT}")
    view, at, before = memoryview(data), len(MAGIC), 0
    while True:
        begin = at
        if len(data) - at < _HEADER.size:
            raise DamagedError(f"it is cut off at byte {len(data)}")
        length, version, size, checksum = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if len(data) - at < length + size:
            raise DamagedError(f"it is cut off at byte {len(data)}, or damaged at byte {begin}")
        name, contents = data[at : at + length], view[at + length : at + length + size]
        at += length + size
        before = _sum(before, name, version, contents)
        if before != checksum or not name.isascii():
            raise DamagedError(f"it is damaged between bytes {begin} and {at}")
        if name == END.encode():
            break
        yield Section(name.decode(), version, contents, begin)
    if at != len(data):
        raise DamagedError(f"something follows its end at byte {at}")
