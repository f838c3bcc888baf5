"""What msgspec raises at bytes that it cannot decode, and how what was saved is decoded."""

from typing import TypeVar

import msgspec

# UnicodeDecodeError: a text is not in UTF-8. RecursionError: it is nested too deeply.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_Contents = TypeVar("_Contents")


def decode_saved(decoder: msgspec.msgpack.Decoder[_Contents], contents: bytes) -> _Contents:
    """Returns the contents of a section of a state file.

    Raises:
        ValueError: they are something else.
    """
    try:
        return decoder.decode(contents)
    except UNDECODABLE:
        raise ValueError("it is not readable") from None
