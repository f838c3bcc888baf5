"""Which calls' messages a session reads, and by what."""

from typing import Any, NamedTuple, Protocol


class MessageDecoder(Protocol):
    """Decodes messages: a compiled decoder."""

    def read(self, message: bytes, /) -> Any:
        """Returns what a message says; None if it gives up, so that the message stays bytes."""


class Reading(NamedTuple):
    """The messages of the calls on a path are read by a decoder, unless they come in parts."""

    path: bytes
    decoder: MessageDecoder
