"""Adds fields at the end of a body's JSON object; all other bytes stay.

The later of two equal names counts: so engines' JSON parsers (Python's json, orjson, pydantic) do.
"""

import msgspec

from kvstate import scan


def members(fields: dict[str, object]) -> bytes:
    """Returns fields as JSON, without the braces of their object."""
    return msgspec.json.encode(fields)[1:-1]


def with_members(body: bytes, written: bytes) -> bytes | None:
    """Returns a body with these members at its end; None if it is not an object.

    What is no JSON otherwise is none afterwards either. written: JSON without the braces around it.
    """
    braces = scan.braces(body)
    if braces is None:
        return None
    close, is_empty = braces
    comma = b"" if is_empty else b","
    return scan.splice(body, ((close, len(body), b"%b%b}" % (comma, written)),))


def with_fields(body: bytes, fields: dict[str, object]) -> bytes | None:
    """Returns a body with these fields at its end; None if it is not an object."""
    return with_members(body, members(fields))
