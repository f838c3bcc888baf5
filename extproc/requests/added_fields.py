"""Adds fields at the end of a body's JSON object; all other bytes stay.

The later of two equal names counts: so engines' JSON parsers (Python's json, orjson, pydantic) do.
"""

import msgspec

_SPACE = b" \t\r\n"


def open_object(body: bytes) -> bytes | None:
    """Returns a body up to where fields can be added; None if it is not an object.

    A comma is at its end if there are fields before. What is no JSON otherwise is none afterwards
    either.
    """
    written = body.rstrip(_SPACE)
    if not (written.endswith(b"}") and written.lstrip(_SPACE).startswith(b"{")):
        return None
    head = written[:-1]
    return head if head.strip(_SPACE) == b"{" else head + b","


def members(fields: dict[str, object]) -> bytes:
    """Returns fields as JSON, without the braces of their object."""
    return msgspec.json.encode(fields)[1:-1]


def with_fields(body: bytes, fields: dict[str, object]) -> bytes | None:
    """Returns a body with these fields at its end; None if it is not an object."""
    head = open_object(body)
    return None if head is None else b"%b%b}" % (head, members(fields))
