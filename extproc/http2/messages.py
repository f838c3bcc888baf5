"""Messages that nobody copies as a whole, since they are long."""

from typing import Final, NamedTuple

# A message of this length or more is not joined by its reader, but passed on in parts of about this
# length: joining all of it at once would hold up everybody else.
LONG_BYTES: Final = 1024 * 1024


class MessageParts:
    """A long message in parts: a thread can join them beside others."""

    __slots__ = ("_bytes", "parts")

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts
        self._bytes = sum(map(len, parts))

    def __len__(self) -> int:
        return self._bytes


Message = bytes | MessageParts


class LongMessage(NamedTuple):
    """A message to send, `before + body[:end] + behind`, whose body nobody copies."""

    before: bytes
    body: bytes
    end: int
    behind: bytes = b""
