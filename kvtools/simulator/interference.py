"""Faults in the next batches of one publisher, to test its readers.

Pure: it decides, and corrupts payloads; the publisher sends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtools.simulator.dialects import WireEvent

Corruption = Literal["event", "batch"]
ReplayFault = Literal["silent", "absent", "truncated"]
Message = tuple[bytes, ...]

_NEVER_USED_BYTE = b"\xc1"  # msgpack gives it no meaning


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of one numbered batch."""

    is_kept: bool
    """Whether it can be replayed."""
    sent: int
    """How often it is sent."""


@dataclass(slots=True)
class Interference:
    """The faults to come; each count is a number of batches."""

    drop: int = 0
    """Numbered and kept, but not sent."""
    lose: int = 0
    """Numbered, neither sent nor kept."""
    duplicate: int = 0
    """Sent twice."""
    corrupt: Corruption | None = None
    """The next batch has one undecodable event, or is no msgpack at all."""
    reorder: bool = False
    """The next two messages are sent in the opposite order."""
    replay: ReplayFault | None = None
    """The fault of the replay socket, until changed."""
    is_silent: bool = False
    """Whether the events socket is closed, until changed."""
    clock_ahead_seconds: float = 0.0
    """How far the clock that stamps batches is ahead, until changed."""
    _delayed: list[Message] = field(default_factory=list)

    def fate(self) -> Fate:
        """Returns the fate of the next batch: lost before dropped, dropped before duplicated."""
        if self.lose:
            self.lose -= 1
            return Fate(is_kept=False, sent=0)
        if self.drop:
            self.drop -= 1
            return Fate(is_kept=True, sent=0)
        if self.duplicate:
            self.duplicate -= 1
            return Fate(is_kept=True, sent=2)
        return Fate(is_kept=True, sent=1)

    def spoiled(self, events: Sequence[WireEvent]) -> Sequence[WireEvent]:
        """Returns the events to encode: the first is replaced if one is to be undecodable."""
        if self.corrupt != "event":
            return events
        self.corrupt = None
        first = events[0]
        wrong: WireEvent
        if isinstance(first, list):
            wrong = ["BlockStored", "no list of hashes"]
        else:
            wrong = {"type": "BlockStored", "block_hashes": "no list of hashes"}
        return [wrong, *events[1:]]

    def garbled(self, payload: bytes) -> bytes:
        """Returns the payload to send: invalid msgpack if that was requested."""
        if self.corrupt != "batch":
            return payload
        self.corrupt = None
        return _NEVER_USED_BYTE + payload

    def ordered(self, messages: list[Message]) -> list[Message]:
        """Returns the messages to send now; holds some back while they are to be reordered."""
        if not (self.reorder and messages):
            return messages
        if not self._delayed:
            self._delayed = messages
            return []
        self.reorder = False
        return messages + self.forget()

    def forget(self) -> list[Message]:
        """Returns and forgets the messages that were held back."""
        held_back, self._delayed = self._delayed, []
        return held_back
