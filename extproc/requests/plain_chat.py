"""Reads the bytes of plain chat completions: messages of a role and a text, and nothing unusual.

Most requests are plain. Where they are in a body is found without decoding it, so that contents
which are known already need not be decoded again (`extproc.tokenizing.plain_turns`). The core reads
them (extproc/native/plain_chat.c). Whatever it does not accept is decoded (`chat_request`), with
the same outcome.
"""

from collections.abc import Iterable

from extproc._core import plain_chat
from extproc.requests.chat_request import LIMITED_FIELDS


def _behind_lengths(words: Iterable[bytes]) -> bytes:
    """Returns words, each behind its length, up to a zero."""
    return b"".join([bytes([len(word)]) + word for word in words]) + b"\0"


# Each name behind its length, and then its values.
_LIMITED = (
    b"".join([_behind_lengths([name.encode(), *values]) for name, values in LIMITED_FIELDS.items()])
    + b"\0"
)

_ROLES = {ord(role[0]): role for role in ("assistant", "system", "user")}


# A plain chat completion: its model and its cache's salt as the client wrote them, None if it did
# not; of each message the first letter of its role; and where each content begins and ends between
# its quotes, two numbers of eight bytes.
PlainChat = tuple[str | None, str | None, bytes, bytes]


def read_plain(body: bytes) -> PlainChat | None:
    """Returns what is in a body; None if it is no plain chat, or if that is not certain.

    Then any decoder that accepts the contents accepts the body, and finds the same.
    """
    return plain_chat(body, _LIMITED)


def roles_in(letters: bytes) -> tuple[str, ...]:
    """Returns the roles of messages, by the letters of a `PlainChat`."""
    return tuple([_ROLES[letter] for letter in letters])
