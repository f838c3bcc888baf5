"""Bodies that were parsed before, so that of a conversation's next turn only what is new is parsed.

They are bounded in bytes; the body asked for least recently goes first.

JSON is read from left to right. A body that begins with the bytes of another, up to the end of a
message there, has the same messages up to that place, and what follows is read in the same state.
So an empty object stands in for these messages, and the short text that this leaves is parsed. It
says the same as the whole or is wrong where the whole is wrong; what is wrong, only the whole says.
"""

import re
import sys
from collections import OrderedDict, deque
from typing import Any, NamedTuple

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


# Messages as templates see them, and whether there is media among their parts.
Shaped = tuple[list[dict[str, Any]], bool]

# To look up, shorten and remember a smaller body costs about what it saves.
MIN_BYTES = 16 * 1024

# A body is found by where its last message ends and so much before that, and then compared.
_SAMPLE_BYTES = 64

# The end is looked for backwards, among the closing braces: one for so many bytes of a body.
_BYTES_PER_BRACE = 128

# No body is worth a longer search; a millisecond's part.
_MAX_BRACES = 2_048

# To measure more parts of messages, calls and the like, would take milliseconds: such are not kept.
_MAX_VALUES = 10_000

# What Python needs besides bytes, texts and parts, measured: an entry, a message.
_ENTRY_BYTES = 1_000
_MESSAGE_BYTES = 400

# One body may take so much of the whole.
_LARGEST_SHARE = 4


class _Entry(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One body.

    start, end: of its messages, from the first to the last, in bytes.
    shaped_bytes: what they take in the form that is kept.
    """

    body: bytes
    start: int
    end: int
    shaped: Shaped
    shaped_bytes: int

    @property
    def tail(self) -> bytes:
        """What stands before the end."""
        return _tail(self.body, self.end)

    @property
    def size_bytes(self) -> int:
        """What it takes, with its share of the structures that find it."""
        return sys.getsizeof(self.body) + self.shaped_bytes + _ENTRY_BYTES


class Known(NamedTuple):
    """A body whose first messages are known.

    text: the body with an empty object in their place; it may be none of an API's.
    end: of the last message, in bytes of the body.
    shaped: the messages left out; not to be changed: other requests share them.
    like: for `remember`.
    """

    text: bytes
    end: int
    shaped: Shaped
    like: _Entry


class KnownBodies:
    """Bodies that hold a list of messages. Safe to use from several threads.

    It serves one thread at a time. Another one that comes meanwhile does not wait: for it nothing
    is known, and nothing is remembered.

    max_bytes: bodies, their messages, and what it takes to find them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._entries: OrderedDict[_Entry, None] = OrderedDict()
        self._by_end: dict[int, dict[bytes, _Entry]] = {}
        self._free = deque([True])  # a lock that nobody waits for: pop and append are atomic

    @property
    def size_bytes(self) -> int:
        """What is in use of `max_bytes`."""
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, body: bytes) -> Known | None:
        """What is known of a body, which need not even be JSON."""
        if len(body) < MIN_BYTES or not self._enter():
            return None
        try:
            entry = self._alike(body)
        finally:
            self._free.append(True)
        if entry is None:
            return None
        short = shortened(body, entry.start, entry.end)
        return None if short is None else Known(short[0], short[1], entry.shaped, entry)

    def remember(self, body: bytes, known: Known | None, shaped: Shaped) -> None:
        """Keeps a body that was parsed; it takes the place of the one that it continues.

        known: as `find` gave it.
        shaped: all its messages, not to be changed any more.
        """
        if len(body) < MIN_BYTES or (known is not None and known.end == known.like.end):
            return
        entry = _entry(body, known, shaped)
        if entry is None or entry.size_bytes > self._max_bytes // _LARGEST_SHARE:
            return
        if not self._enter():
            return
        try:
            self._keep(entry, known.like if known is not None else None)
        finally:
            self._free.append(True)

    def _enter(self) -> bool:
        try:
            return self._free.pop()
        except IndexError:
            return False

    def _alike(self, body: bytes) -> _Entry | None:
        """The entry whose messages a body begins with; of several, the one that ends last."""
        at = len(body)
        for _ in range(min(len(body) // _BYTES_PER_BRACE, _MAX_BRACES)):
            at = body.rfind(b"}", 0, at)
            if at < 0:
                break
            tails = self._by_end.get(at + 1)
            if tails is None:
                continue
            entry = tails.get(_tail(body, at + 1))
            # a view of it, since a slice would be a copy
            if entry is not None and body.startswith(memoryview(entry.body)[: entry.end]):
                self._entries.move_to_end(entry)
                return entry
        return None

    def _keep(self, entry: _Entry, like: _Entry | None) -> None:
        twin = self._by_end.get(entry.end, {}).get(entry.tail)
        for old in {twin, like}:
            if old is not None and old in self._entries:
                self._forget(old)
        self._entries[entry] = None
        self._by_end.setdefault(entry.end, {})[entry.tail] = entry
        self._size_bytes += entry.size_bytes
        while self._size_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry]
        self._size_bytes -= entry.size_bytes
        tails = self._by_end[entry.end]
        del tails[entry.tail]
        if not tails:
            del self._by_end[entry.end]


def _tail(body: bytes, end: int) -> bytes:
    return body[max(0, end - _SAMPLE_BYTES) : end]


def _entry(body: bytes, known: Known | None, shaped: Shaped) -> _Entry | None:
    messages = shaped[0]
    if known is not None:
        like = known.like
        size_bytes = like.shaped_bytes + _size_bytes(messages[len(known.shaped[0]) :])
        return _Entry(body, like.start, known.end, shaped, size_bytes)
    span = span_of(body)
    return None if span is None else _Entry(body, *span, shaped, _size_bytes(messages))


def _size_bytes(messages: list[dict[str, Any]]) -> int:
    """What messages take in memory, with their share of a list; more than is there if unknown."""
    total = _MESSAGE_BYTES * len(messages)
    pending: list[object] = []
    for message in messages:
        content = message["content"]
        if len(message) == len(("role", "content")) and isinstance(content, str):
            total += sys.getsizeof(content)  # as nearly always
        else:
            pending += message.values()
    values = 0
    while pending:
        value = pending.pop()
        values += 1
        if values > _MAX_VALUES:
            return sys.maxsize
        total += sys.getsizeof(value)
        if isinstance(value, dict):
            pending += value
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return total
