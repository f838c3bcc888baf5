"""Where the messages of a JSON body stand, and the body without those that are known.

JSON is read from left to right. A body that begins with the bytes of another, up to the end of a
message there, has the same messages up to that place, and what follows is read in the same state.
So an empty object stands in for these messages, and the short text that this leaves is parsed. It
says the same as the whole or is wrong where the whole is wrong; what is wrong, only the whole says.
"""

import re

import msgspec

# Stands where known messages stood. Nobody writes an empty object so: where one does, nothing is
# known. No text can end in a part of it and begin in another.
_STAND_IN = b"{\t \t}"

_COMMA = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")

# A message is looked for by its beginning: the whole would be a slow needle.
_NEEDLE_BYTES = 64


class _Unread(msgspec.Struct):
    messages: list[msgspec.Raw]


_unread = msgspec.json.Decoder(_Unread)


def span_of(body: bytes) -> tuple[int, int] | None:
    """Where the first message begins and the last one ends, None where that is not plain.

    In bytes of the body, which need not even be JSON.
    """
    messages = _messages(body)
    if not messages:
        return None
    start = body.find(memoryview(messages[0])[:_NEEDLE_BYTES])
    head = body[:start]
    # what is put there must be the one message: so it is that list, and its beginning
    if _STAND_IN in head or [*map(bytes, _messages(head + _STAND_IN + b"]}"))] != [_STAND_IN]:
        return None
    end = _end(body, start, messages)
    return None if end is None else (start, end)


def shortened(body: bytes, start: int, end: int) -> tuple[bytes, int] | None:
    """A body with an empty object in place of known messages; None where that is not plain.

    start, end: of these, in another body that has the same bytes up to there. Beside the short
    body, where the last message ends in the whole.
    """
    rest = body[end:]
    if _STAND_IN in rest:
        return None
    text = b"".join((body[:start], _STAND_IN, rest))
    messages = _messages(text)
    # a body may name its messages once more: those count then, and they do not stand here
    last = _end(text, start, messages) if messages else None
    return None if last is None else (text, last + len(body) - len(text))


def _messages(body: bytes) -> list[msgspec.Raw]:
    """The messages that count, unread; none if it is no such body."""
    try:
        return _unread.decode(body).messages
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def _end(body: bytes, start: int, messages: list[msgspec.Raw]) -> int | None:
    """Where the last of messages ends, if these stand there with the same between any two."""
    comma = _COMMA.match(body, start + len(memoryview(messages[0])))
    text = (comma[0] if comma else b"").join(messages)
    return start + len(text) if body.startswith(text, start) else None
