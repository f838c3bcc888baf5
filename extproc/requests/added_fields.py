"""Adds fields at the end of a body's JSON object; all other bytes stay.

The later of two equal names counts: so engines' JSON parsers (Python's json, orjson, pydantic) do.
"""

from typing import Final

import msgspec

from kvstate import scan

# A body of this length or more is not copied to add to it.
LONG_BYTES: Final = 256 * 1024


class ExtendedBody(msgspec.Struct, frozen=True, gc=False):
    """A long body that ends otherwise: `body[:end] + tail`, which nobody has joined yet."""

    body: bytes
    end: int
    tail: bytes

    def __len__(self) -> int:
        return self.end + len(self.tail)

    def __bytes__(self) -> bytes:
        return scan.splice(self.body, ((self.end, len(self.body), self.tail),))


Body = bytes | ExtendedBody


def members(fields: dict[str, object]) -> bytes:
    """Returns fields as JSON, without the braces of their object."""
    return msgspec.json.encode(fields)[1:-1]


def with_members(body: Body, written: bytes) -> Body | None:
    """Returns a body with these members at its end; None if it is not an object.

    What is no JSON otherwise is none afterwards either. written: JSON without the braces around it.
    """
    if isinstance(body, ExtendedBody):
        return ExtendedBody(body.body, body.end, b"%b,%b}" % (body.tail[:-1], written))
    braces = scan.braces(body)
    if braces is None:
        return None
    close, is_empty = braces
    tail = b"%b%b}" % (b"" if is_empty else b",", written)
    if len(body) >= LONG_BYTES:
        return ExtendedBody(body, close, tail)
    return scan.splice(body, ((close, len(body), tail),))


def with_fields(body: Body, fields: dict[str, object]) -> Body | None:
    """Returns a body with these fields at its end; None if it is not an object."""
    return with_members(body, members(fields))
